from vllm_kvq.cli import main

raise SystemExit(main())
