"""What an arm leaves behind: one JSON file, written as the arm goes on, that holds all a report needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measuring import rounded

from trainers.files import write_atomically
from webshop_env.errors import ShopGymError

FIGURES = (
    *("rollout/success_frac", "rollout/task_score", "rollout/episode_length_steps", "rollout/num_steps"),
    *("rollout/invalid_format_frac", "rollout/impossible_action_frac", "rollout/purchase_frac"),
    *("rollout/mixed_group_frac", "rollout/step_credit_frac", "rollout/prompt_length_tokens"),
    *("rollout/prompt_length_max_tokens", "rollout/reply_length_tokens", "rollout/cut_prompt_frac"),
    *("actor/loss", "actor/kl_to_reference_nats", "actor/entropy_nats", "actor/grad_norm", "actor/update_skipped"),
    *("actor/engine_gap_mean_nats", "actor/engine_gap_max_nats"),
)
"""Metrics of an update that are kept, besides all its times."""
NOT_KEPT = ("trainer.output_dir", "trainer.resume_from")
PLACES = {"env.webshop.data_dir": "DIR", "actor_rollout_ref.model.path": "START", "data.train_files": "LIST"}
"""Settings that say where something lay on the machine, and what stands in their place."""


class ArmFile:
    """The record of an arm.

    Attributes:
        content: What is in it.
    """

    def __init__(self, content: dict[str, Any], paths: list[Path]) -> None:
        """Takes a record and the places where it is kept; the first is the one that is read again."""
        self.content, self._paths = content, paths

    @classmethod
    def open(cls, paths: list[Path], *, updates_done: int, new: dict[str, Any]) -> ArmFile:
        """A new record, or that of an arm that goes on, without what came after its checkpoint.

        Raises:
            ShopGymError: The arm goes on and its record is gone, or it was begun with other settings, which it keeps.
        """
        content = new
        if paths[0].is_file():
            content = json.loads(paths[0].read_text(encoding="utf-8"))
            if content["differs_in"] != new["differs_in"]:
                raise ShopGymError(
                    f"{paths[0].parent} is an arm with {' '.join(content['differs_in']) or 'no settings of its own'}; "
                    "go on with the same words, or give another --label"
                )
            kept = [i for i, update in enumerate(content["updates"]["update"]) if update <= updates_done]
            content["updates"] = {name: [column[i] for i in kept] for name, column in content["updates"].items()}
            content["measurements"] = [m for m in content["measurements"] if m["updates"] <= updates_done]
            content["sessions"] += new["sessions"]
        elif updates_done:
            raise ShopGymError(f"{paths[0]} is gone, but the run beside it has a checkpoint; delete the run directory")
        file = cls(content, paths)
        file.write()
        return file

    @property
    def train_s(self) -> float:
        """Seconds of all updates so far."""
        return float(sum(self.content["updates"].get("wall_s", ())))

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return len(self.content["updates"]["update"])

    def measured(self, updates: int) -> bool:
        """Whether the test goals were played after so many updates."""
        return any(m["updates"] == updates for m in self.content["measurements"])

    def add_update(self, updates: int, wall_s: float, line: dict[str, Any]) -> None:
        """Keeps the figures of an update, a column each; None where an update has none."""
        figures = {"update": updates, "wall_s": wall_s}
        figures |= {name: float(line[name]) for name in FIGURES if name in line}
        figures |= {name: float(value) for name, value in line.items() if name.startswith("time/")}
        columns, num = self.content["updates"], self.num_updates
        for name in figures.keys() - columns.keys():
            columns[name] = [None] * num
        for name, column in columns.items():
            column.append(rounded(figures).get(name))

    def add_measurement(self, updates: int, measurement: dict[str, Any]) -> None:
        """Keeps what became of the test goals after so many updates."""
        self.content["measurements"].append({"updates": updates, "train_s": round(self.train_s, 2), **measurement})

    def write(self) -> None:
        """Brings all copies of the file up to date."""
        text = json.dumps(self.content, allow_nan=False) + "\n"
        for path in self._paths:
            write_atomically(path, text)


def settings_to_keep(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without the places where things lay on the machine."""
    kept = {key: value for key, value in settings.items() if key not in NOT_KEPT}
    return kept | {key: name for key, name in PLACES.items() if kept.get(key)}
