"""One engine over several ranks, each of which holds a part of the model (tensor parallel): the first of them leads.

The parts compute every token together, so all ranks of such a group must do the same with their part in the same
order. The leader plays: it has the environments, and its calls for replies are sent to its followers before it makes
them itself. A follower does as it is told until the leader has played, and drops the replies, which are the leader's
too. What all ranks of a run do together anyway (new weights, sleep, end) is not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rollout.engines.vllm import VLLMEngine
    from rollout.types import Generation, GenerationRequest, SamplingParams


class RankGroups:
    """Neighbouring ranks in groups of equal size."""

    def __init__(self, size: int) -> None:
        """Every rank of the default process group must make it, and `size` must divide their number."""
        rank, world = dist.get_rank(), dist.get_world_size()
        self.size = size
        self.number = rank // size
        """Of this rank's group, from 0."""
        self.is_leader = rank % size == 0
        self._leader = self.number * size
        groups = [dist.new_group(range(first, first + size), backend="gloo") for first in range(0, world, size)]
        self._group = groups[self.number]

    def send(self, message: Any) -> Any:
        """The leader's message, on every rank of the group; what a follower passes is not looked at."""
        box = [message]
        dist.broadcast_object_list(box, src=self._leader, group=self._group)
        return box[0]


class LedEngine:
    """This rank's part of an engine. The leader's is used as any engine, by a follower's nothing is asked for."""

    def __init__(self, part: VLLMEngine, groups: RankGroups) -> None:
        self.part, self.groups = part, groups
        self.notes, self.dtype, self.weight_version = part.notes, part.dtype, part.weight_version

    def encode(self, prompt: str) -> np.ndarray:
        """As the part's."""
        return self.part.encode(prompt)

    def encode_all(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """As the part's."""
        return self.part.encode_all(prompts)

    def count_tokens(self, prompt: str) -> int:
        """As the part's."""
        return self.part.count_tokens(prompt)

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        """As the part's, on all ranks of the group."""
        self.groups.send(("submit", (list(requests), params)))
        return self.part.submit(requests, params)

    def poll(self) -> list[tuple[int, Generation]]:
        """As the part's, on all ranks of the group."""
        self.groups.send(("poll", ()))
        return self.part.poll()

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """As the part's, on all ranks of the group."""
        self.groups.send(("generate", (list(requests), params)))
        return self.part.generate(requests, params)

    def follow(self) -> None:
        """Does what the leader does, until it has played.

        Raises:
            ShopGymError: The part refused a call, as the leader's did, which says so to everybody when it has played.
        """
        refusal: ShopGymError | None = None
        while (call := self.groups.send(None)) is not None:
            name, arguments = call
            try:
                getattr(self.part, name)(*arguments)
            except ShopGymError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def has_played(self) -> None:
        """Lets the followers go on with what all ranks do together."""
        self.groups.send(None)

    def load_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """As the part's, which keeps its share of each tensor; all ranks must call it."""
        self.part.load_weights(weights, version)
        self.weight_version = version

    def sleep(self) -> None:
        """As the part's; all ranks must call it."""
        self.part.sleep()

    def pop_seconds(self) -> dict[str, float]:
        """As the part's."""
        return self.part.pop_seconds()

    def close(self) -> None:
        """As the part's; all ranks must call it."""
        self.part.close()
