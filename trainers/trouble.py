"""What can go wrong in a run without an error, each said once until it clears.

A trouble is a claim about one line of metrics, so that it can be looked up afterwards too: feed `metrics.jsonl` to
`TroubleWatch.look`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

Line = Mapping[str, float]

CUT_FRAC = 0.5
"""More prompts, or replies, than this being cut is most of them."""
FIRST_RATIO_DISTANCE = 0.05
"""Mean distance from 1 of the first mini-batch's ratios: the same weights in bfloat16 stay well under it."""
ENGINE_GAP_NATS = 0.1
"""Mean gap between engine and trainer: the same weights in bfloat16 stay well under it."""
KL_TO_REFERENCE_NATS = 1.0
"""Per token, mean; a policy that improves stays under a tenth of it."""
KL_TO_OLD_NATS = 0.2
"""Per token, mean over an update; an update within the clip limits stays under a tenth of it."""
ENTROPY_LEFT = 0.1
"""Share of the entropy of the run's first update below which it has collapsed."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that can be wrong."""

    name: str
    needs: tuple[str, ...]
    """Figures without which a line says nothing about it."""
    is_there: Callable[[Line, Line], bool]
    """Of this line, and the first line of the run that had the figures."""
    says: str
    """What is wrong and what to do; figures of the line stand in braces."""


TROUBLES = (
    Trouble(
        "all groups equal",
        ("rollout/mixed_group_frac", "rollout/success_frac", "rollout/num_groups", "rollout/num_episodes"),
        lambda now, _: now["rollout/mixed_group_frac"] == 0 and now["rollout/num_groups"] < now["rollout/num_episodes"],
        "in every group all episodes have the same return (success {rollout/success_frac:.3f}), so that none is better "
        "than its siblings: take goals that are sometimes won (algorithm.filter_groups.enable=true plays on until some "
        "are), larger groups (env.rollout.n), or env.reward=score",
    ),
    Trouble(
        "no purchase",
        ("rollout/purchase_frac", "rollout/episode_length_steps"),
        lambda now, _: now["rollout/purchase_frac"] == 0,
        "no episode of the rollout ended by itself, with a purchase; all ran out of their "
        "{rollout/episode_length_steps:.0f} steps: raise env.max_steps, begin with a policy that imitates "
        "(trainers/sft.py), or look at validations/*.txt for what it does instead",
    ),
    Trouble(
        "most prompts cut",
        ("rollout/cut_prompt_frac", "rollout/prompt_length_max_tokens"),
        lambda now, _: now["rollout/cut_prompt_frac"] > CUT_FRAC,
        "{rollout/cut_prompt_frac:.0%} of the prompts had something left out to fit (the longest has "
        "{rollout/prompt_length_max_tokens:.0f} tokens): raise data.max_prompt_length or lower env.history_length",
    ),
    Trouble(
        "most replies cut",
        ("rollout/cut_reply_frac", "rollout/reply_length_max_tokens"),
        lambda now, _: now["rollout/cut_reply_frac"] > CUT_FRAC,
        "{rollout/cut_reply_frac:.0%} of the replies were ended by the limit of {rollout/reply_length_max_tokens:.0f} "
        "tokens: raise data.max_response_length",
    ),
    Trouble(
        "ratio far from 1 at the first mini-batch",
        ("actor/first_ratio_distance",),
        lambda now, _: now["actor/first_ratio_distance"] > FIRST_RATIO_DISTANCE,
        "before any optimizer step the ratios of new to old probabilities are {actor/first_ratio_distance:.3f} away "
        "from 1 on average, though the weights are the same: the model's forward pass is not deterministic, or "
        "computes otherwise with gradients (dropout, another precision, another attention)",
    ),
    Trouble(
        "optimizer steps skipped",
        ("actor/skipped_steps",),
        lambda now, _: now["actor/skipped_steps"] > 0,
        "{actor/skipped_steps:.0f} optimizer steps of the update were left out, because their loss or gradient was no "
        "number; trainer.max_nan_steps in a row end the run: lower actor_rollout_ref.actor.optim.lr, or look for a "
        "reward or coefficient that is too large",
    ),
    Trouble(
        "engine far from trainer",
        ("actor/engine_gap_mean_nats",),
        lambda now, _: now["actor/engine_gap_mean_nats"] > ENGINE_GAP_NATS,
        "the engine's log-probs are {actor/engine_gap_mean_nats:.3f} nats a token away from the trainer's, so that "
        "rollouts are off-policy (other precision, other weights?); truncated importance weights correct small gaps "
        "only",
    ),
    Trouble(
        "entropy collapse",
        ("actor/entropy_nats",),
        lambda now, first: now["actor/entropy_nats"] < ENTROPY_LEFT * first["actor/entropy_nats"],
        "the entropy fell to {actor/entropy_nats:.4f} nats a token, less than a tenth of what the run began with; the "
        "policy explores no more: lower actor_rollout_ref.actor.optim.lr, or raise .entropy_coeff or .kl_loss_coef, "
        "and go on from an earlier checkpoint",
    ),
    Trouble(
        "KL explosion",
        ("actor/kl_to_reference_nats",),
        lambda now, _: now["actor/kl_to_reference_nats"] > KL_TO_REFERENCE_NATS,
        "the policy runs away: KL {actor/kl_to_reference_nats:.3f} nats a token to the reference: lower "
        "actor_rollout_ref.actor.optim.lr, raise .kl_loss_coef (algorithm.kl_ctrl.kl_coef with the KL in the reward), "
        "and go on from an earlier checkpoint",
    ),
    Trouble(
        "KL explosion within an update",
        ("actor/kl_to_old_nats",),
        lambda now, _: now["actor/kl_to_old_nats"] > KL_TO_OLD_NATS,
        "the policy runs away: KL {actor/kl_to_old_nats:.3f} nats a token within the update: lower "
        "actor_rollout_ref.actor.optim.lr, and go on from an earlier checkpoint",
    ),
)


class TroubleWatch:
    """Remembers which troubles have been told."""

    def __init__(self, past: Iterable[Line] = ()) -> None:
        """Begins as after these lines, those of a run that goes on."""
        self._told: set[str] = set()
        self._first: dict[str, Line] = {}
        for line in past:
            self.look(line)

    def look(self, line: Line) -> list[str]:
        """The troubles that begin with this line; one that lasts is told again only after it was gone."""
        warnings = []
        for trouble in TROUBLES:
            if any(name not in line for name in trouble.needs):
                continue
            first = self._first.setdefault(trouble.name, line)
            if not trouble.is_there(line, first):
                self._told.discard(trouble.name)
            elif trouble.name not in self._told:
                self._told.add(trouble.name)
                warnings.append(f"{trouble.name}: {trouble.says.format_map(line)}")
        return warnings
