"""Make a catalogue of any size for scale tests: `python -m data.generate_large --out DIR --products 1180000`.

Files, fields and statistics are those of WebShop's products (`data/README.md` compares them), the words are made up:
see `data/language.py`. The same seed gives the same products; a smaller catalogue is the beginning of a larger one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.files import new_files
from data.language import Language, topic_words
from data.phrases import capitalised
from webshop_env.command_line import run_safely, say
from webshop_env.errors import ShopGymError

LARGE_VERSION = 1
"""Raise it with every change that changes the files of a given seed."""
NUM_KINDS = 1000
CHUNK = 2048
"""Products that are drawn together."""

DEPARTMENTS = ("fashion", "beauty", "electronics", "garden", "grocery")
OPTION_NAMES = ("color", "size", "color", "size", "color", "size", "style", "flavor name")
COLOURS = (
    *("black", "white", "blue", "red", "green", "pink", "grey"),
    *("brown", "purple", "beige", "silver", "gold", "navy"),
)
SHADES = ("", "", "", "light ", "dark ", "matte ", "deep ")
SIZES = ("small", "medium", "large", "x-large", "xx-large", "x-small", "one size", "queen", "king", "twin", "full")
SMALL_WORDS = ("the", "and", "for", "with", "of", "to", "is", "in", "a", "it", "are", "this", "not", "or", "be")
FOREIGN = ("\u2019s", "\u2122", "\u00d7", "\u2605", "\u2013", "\u00b0", "\u00e9", "\u2714", "\U0001f49d", "\u201d")


@dataclass(frozen=True, slots=True)
class LargeKind:
    """What the products of one search label share."""

    label: str
    department: str
    path: str
    attributes: tuple[str, ...]
    values: tuple[str, ...]
    """Of option groups that are neither colours nor sizes."""
    base_price: float


class LargeCatalogue:
    """Products of one seed, drawn in chunks.

    Args:
        seed: Any integer of at least 0; another seed, other products.
    """

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ShopGymError(f"--seed must be at least 0, got {seed}")
        self._seed = seed
        lengths = _draw_lengths(np.random.default_rng([seed, 1]).random((4096, 4)))
        self._language = Language(lengths.sum(axis=1))
        self._kinds = [self._kind(number) for number in range(NUM_KINDS)]

    def records(self, num_products: int) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]]:
        """Each product with its attribute record and, for one in eighty, its human instruction."""
        for start in range(0, num_products, CHUNK):
            yield from self._chunk(start, min(CHUNK, num_products - start))

    def _kind(self, number: int) -> LargeKind:
        own = topic_words(np.full(256, number), np.arange(256), np.zeros(256, dtype=np.int64)).tolist()
        words = [self._language.spell(word) for word in own]
        department = DEPARTMENTS[number % len(DEPARTMENTS)]
        path = " \u203a ".join([capitalised(department), capitalised(words[60]), f"{capitalised(words[20])}"])
        return LargeKind(
            label=f"{words[16]} {words[10 + number % 6]}s",
            department=department,
            path=path,
            attributes=tuple(f"{words[24 + i]} {words[i % 16]}" for i in range(32)),
            values=tuple(words[64:112]),
            base_price=5.0 * 1.006**number,
        )

    def _chunk(self, start: int, count: int) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]]:
        """Draw a whole chunk, so that a product does not depend on how many follow it."""
        rng = np.random.default_rng([self._seed, 2, start])
        lengths = _draw_lengths(rng.random((CHUNK, 4)))  # [CHUNK, 3]
        kinds = (NUM_KINDS * rng.random(CHUNK) ** 1.2).astype(np.int64)
        details = rng.random((CHUNK, 64)).tolist()
        totals = lengths.sum(axis=1)
        ends = np.cumsum(totals)
        num_words = int(ends[-1])
        begins = np.repeat(ends - totals, totals)
        drawn = self._language.draw(rng.random(num_words), rng.random(num_words), np.repeat(kinds, totals))
        places = np.arange(num_words)
        is_fresh = (rng.random(num_words) < self._language.fresh_frac) | (places == begins)
        earlier = begins + (rng.random(num_words) * (places - begins)).astype(np.int64)
        words = np.where(is_fresh, drawn, drawn[earlier]).tolist()
        marks = (256 * rng.random(num_words)).astype(np.int64).tolist()
        spell = self._language.spell
        for row in range(count):
            end = int(ends[row])
            first = end - int(totals[row])
            texts = [spell(word) for word in words[first:end]]
            draft = _Draft(
                start + row,
                self._kinds[kinds[row]],
                texts,
                marks=marks[first:end],
                lengths=lengths[row],
                chances=details[row],
            )
            yield draft.product(), draft.instruction(), draft.human()


class _Draft:
    """One product on its way into the files."""

    def __init__(
        self,
        number: int,
        kind: LargeKind,
        words: list[str],
        *,
        marks: list[int],
        lengths: np.ndarray,
        chances: list[float],
    ) -> None:
        """Write the texts.

        Args:
            number: Place in the catalogue.
            kind: What it is.
            words: Of title, description and first bullet point.
            marks: For each word a number in 0 to 255, which says how it stands in a sentence.
            lengths: How many words are the title's, the description's and the bullet point's.
            chances: 64 uniform numbers, for everything else.
        """
        self.kind, self.chances = kind, chances
        self.asin = make_asin(number)
        title_end, description_end = int(lengths[0]), int(lengths[0] + lengths[1])
        self.title_words = words[:title_end]
        self.description = _sentences(words[title_end:description_end], marks[title_end:description_end])
        self.bullet = _sentences(words[description_end:], marks[description_end:])
        self.attributes = self._draw_attributes()
        self.options = self._draw_options()
        if chances[0] < 0.38:
            self._add_foreign()

    def _draw_attributes(self) -> list[str]:
        count = int(5.7 * self.chances[1])  # 0 to 5
        places = {int(chance * len(self.kind.attributes)) for chance in self.chances[2 : 2 + count]}
        return [self.kind.attributes[place] for place in sorted(places)]

    def _draw_options(self) -> dict[str, list[str]]:
        chance, chances = self.chances[10], self.chances
        num_groups = 0 if chance < 0.577 else 1 if chance < 0.822 else 2 if chance < 0.987 else 3
        options: dict[str, list[str]] = {}
        for group in range(num_groups):
            name = OPTION_NAMES[(int(chances[11] * len(OPTION_NAMES)) + group) % len(OPTION_NAMES)]
            count = min(2 + int(2.6 * (1 / (1 - chances[12 + group]) ** 0.62 - 1)), 45)
            options[name] = list(dict.fromkeys(self._option_value(name, group, place) for place in range(count)))
        return options

    def _option_value(self, name: str, group: int, place: int) -> str:
        chance = self.chances[16 + (group * 13 + place) % 40]
        if name == "color":
            colour = COLOURS[int(chance * 40 + place) % len(COLOURS)]
            return SHADES[int(chance * 70) % len(SHADES)] + colour
        if name == "size":
            if self.chances[15] < 0.5:
                return SIZES[(int(self.chances[14] * len(SIZES)) + place) % len(SIZES)]
            if chance < 0.4:
                return f"{int(chance * 40) + 1} x {int(chance * 900) % 30 + 1}"
            return str(place + int(chance * 12))
        return self.kind.values[int(chance * 1000 + place) % len(self.kind.values)]

    def _add_foreign(self) -> None:
        sign = FOREIGN[int(self.chances[3] * len(FOREIGN))]
        place = int(self.chances[4] * len(self.title_words))
        if self.description:
            self.description = self.description.replace(". ", f"{sign}.\u00a0", 2) + sign
        elif self.bullet:
            self.bullet = f"\u3010{self.bullet[: 9 + place]}\u3011{self.bullet[9 + place :]}"
        else:
            self.title_words[place] += sign

    def product(self) -> dict[str, Any]:
        """The record of the product file."""
        attributes = [" ".join(map(capitalised, attribute.split())) for attribute in self.attributes]
        name = " ".join(map(capitalised, [*self.title_words, *self.kind.label.split()]))
        name += "".join(f", {attribute}" for attribute in attributes[:2])
        return {
            "name": name,
            "full_description": self.description,
            "pricing": self._price(),
            "images": [""],
            "product_category": self.kind.path,
            "average_rating": round(3.4 + 1.6 * self.chances[57], 1),
            "small_description": [self.bullet, *(f"{attribute}: {self.kind.label} " for attribute in attributes)],
            "customization_options": {
                " ".join(map(capitalised, name.split())): [
                    {"is_selected": False, "is_available": True, "value": value, "image": None} for value in values
                ]
                for name, values in self.options.items()
            },
            "asin": self.asin,
            "category": self.kind.department,
            "query": self.kind.label,
        }

    def _price(self) -> str:
        fate, price = self.chances[58], self.kind.base_price * (0.5 + self.chances[59])
        if fate < 0.089:
            return ""
        if fate < 0.182:
            return f"${price:.2f}${price * (1.1 + self.chances[60]):.2f}"
        return f"${price:.2f}"

    def instruction(self) -> dict[str, Any]:
        """The record of the attribute file; two products in five have an instruction."""
        record: dict[str, Any] = {"attributes": self.attributes}
        if self.attributes and self.chances[61] < 0.5:
            wanted = self.attributes[:3]
            record["instruction"] = f"Look for {self.kind.label} with {', '.join(wanted)}"
            record["instruction_attributes"] = wanted
        return record

    def human(self) -> dict[str, Any] | None:
        if not self.attributes or self.chances[62] >= 0.016:
            return None
        chosen = {name: values[0] for name, values in self.options.items()}
        told = "".join(f", {value}" for value in chosen.values())
        return {
            "asin": self.asin,
            "instruction": f"i want {self.attributes[0]} {self.kind.label}{told}.",
            "attributes": self.attributes,
            "options": [f"{name}: {value}" for name, value in chosen.items()] or [""],
            "instruction_attributes": self.attributes[:1],
            "instruction_options": list(chosen.values()),
        }


def make_asin(number: int) -> str:
    """Ten characters, different for every number below 36 ** 8, in no order."""
    rest, letters = (number * 1_000_000_000_039 + 777_777) % 36**8, ""
    for _ in range(8):
        rest, digit = divmod(rest, 36)
        letters += "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[digit]
    return f"B0{letters}"


def _draw_lengths(chances: np.ndarray) -> np.ndarray:
    """Words in title, description and first bullet point, without small words; int64 [any, 3].

    Args:
        chances: float64 [any, 4], uniform.
    """
    normal = _normal(chances[:, :3])
    titles = np.clip(14 + 7 * normal[:, 0], 2, 36)
    descriptions = np.where(chances[:, 3] < 0.3, 0, np.clip(70 * np.exp(0.85 * normal[:, 1]), 4, 330))
    bullets = np.where(chances[:, 2] < 0.07, 0, np.clip(14 * np.exp(0.8 * normal[:, 2]), 1, 200))
    return np.stack([titles, descriptions, bullets], axis=1).astype(np.int64)


def _normal(chances: np.ndarray) -> np.ndarray:
    """About normal quantiles of uniform numbers."""
    return (chances**0.135 - (1 - chances) ** 0.135) / 0.1975


def _sentences(words: Sequence[str], marks: Sequence[int]) -> str:
    """Words with small words, plurals and punctuation between them."""
    parts = []
    for word, mark in zip(words, marks, strict=True):
        if mark < 66:
            parts.append(SMALL_WORDS[mark % len(SMALL_WORDS)])
        elif mark < 80:
            word += "s"
        elif mark < 96:
            word += "."
        elif mark < 116:
            word += ","
        elif mark < 120:
            word += "-" + words[0]
        parts.append(word)
    text = " ".join(parts)
    return text[:1].upper() + text[1:]


class _Writer:
    """One JSON file, an entry a line, with its size and hash."""

    def __init__(self, file: BinaryIO, brackets: str) -> None:
        self._file, self._close = file, brackets[1]
        self._digest = hashlib.sha256()
        self._num_entries = self._num_bytes = 0
        self._put(brackets[0])

    def add(self, entry: str) -> None:
        self._put((",\n" if self._num_entries else "\n") + entry)
        self._num_entries += 1

    def finish(self) -> dict[str, Any]:
        self._put(f"\n{self._close}\n")
        self._file.flush()
        return {"bytes": self._num_bytes, "sha256": self._digest.hexdigest()}

    def _put(self, text: str) -> None:
        data = text.encode("ascii")
        self._digest.update(data)
        self._num_bytes += len(data)
        self._file.write(data)


def write_large_catalogue(out: Path, *, seed: int, num_products: int) -> dict[str, Any]:
    """Write the files and a manifest; every file appears when all are whole.

    Returns:
        The manifest: generator, seed, products, and the size and hash of each file.
    """
    if num_products < 1:
        raise ShopGymError(f"--products must be at least 1, got {num_products}")
    catalogue = LargeCatalogue(seed)
    names = [f"items_{kind}_{num_products}.json" for kind in ("shuffle", "ins_v2", "human_ins")]
    encode = json.JSONEncoder(separators=(",", ":")).encode
    with new_files(out, [*names, "manifest.json"]) as scratch, ExitStack() as stack:
        files = [stack.enter_context((scratch / name).open("wb", buffering=1 << 20)) for name in names]
        products, instructions, human = (_Writer(file, b) for file, b in zip(files, ("[]", "{}", "{}"), strict=True))
        for product, instruction, written in catalogue.records(num_products):
            key = f'"{product["asin"]}":'
            products.add(encode(product))
            instructions.add(key + encode(instruction))
            if written is not None:
                human.add(key + encode([written]))
        facts = dict(zip(names, (writer.finish() for writer in (products, instructions, human)), strict=True))
        manifest = {"large_version": LARGE_VERSION, "seed": seed, "products": num_products, "files": facts}
        (scratch / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="ascii")
    return manifest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m data.generate_large", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; made if missing")
    parser.add_argument("--products", type=int, required=True, help="number of products")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another catalogue (default 0)")
    return run_safely(lambda: _run(parser.parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    began = time.perf_counter()
    try:
        manifest = write_large_catalogue(arguments.out, seed=arguments.seed, num_products=arguments.products)
    except OSError as error:
        raise ShopGymError(f"--out {arguments.out}: cannot be written ({error.strerror}); name another") from None
    for name, facts in manifest["files"].items():
        say(f"{arguments.out / name}  {facts['bytes']:,} bytes")
    say(f"{manifest['products']:,} products in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
