"""vLLM's CPU platform refuses Ray; these are the few lines that make it take Ray, so that the executor can be tested.

On GPUs none of this is needed: `--distributed-executor-backend ray` is vLLM's own flag there.
"""

from __future__ import annotations

DEVICE = "NPU"
"""An accelerator that Ray hands out by number without looking for it; here there is none."""


def name_device() -> None:
    """In the driver and in every worker of Ray: the resource that vLLM asks Ray for."""
    from vllm.platforms import current_platform

    type(current_platform).ray_device_key = DEVICE


def start(devices: int) -> None:
    import ray

    name_device()
    ray.init(
        address="local",
        num_cpus=devices,
        resources={DEVICE: devices},
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"worker_process_setup_hook": f"{__name__}.{name_device.__name__}"},
    )


def stop() -> None:
    import ray

    ray.shutdown()
