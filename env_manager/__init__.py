"""Many text environments at once: memory, prompts, projection of replies, a registry of environments."""

from env_manager.base import EnvConfig, EnvManager, Observations, StepResult
from env_manager.memory import MemoryEntry, MemoryLimits, register_memory
from env_manager.projection import ParsedReply
from env_manager.registry import EnvSpec, get_env_spec, register_env
from env_manager.types import PageView

__all__ = [
    "EnvConfig",
    "EnvManager",
    "EnvSpec",
    "MemoryEntry",
    "MemoryLimits",
    "Observations",
    "PageView",
    "ParsedReply",
    "StepResult",
    "get_env_spec",
    "register_env",
    "register_memory",
]
