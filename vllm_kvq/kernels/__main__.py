"""Build the CPU kernels ahead of time: `python -m vllm_kvq.kernels`."""

from vllm_kvq.kernels.build import main

raise SystemExit(main())
