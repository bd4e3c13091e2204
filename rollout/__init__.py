"""Playing many episodes with a policy, and the rows that come out of it."""

from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.storage import load_batch, save_batch
from rollout.types import (
    Generation,
    GenerationRequest,
    NoiseKey,
    Policy,
    SamplingParams,
    StepBatch,
    StreamingPolicy,
)

__all__ = [
    "CollectorConfig",
    "Generation",
    "GenerationRequest",
    "NoiseKey",
    "Policy",
    "SamplingParams",
    "StepBatch",
    "StreamingPolicy",
    "TrajectoryCollector",
    "load_batch",
    "save_batch",
]
