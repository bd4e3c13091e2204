"""The analyzer: Porter's own examples, word boundaries worked out by hand, and every recorded document."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from webshop_env.catalog import index_document, load_catalog
from webshop_env.search import analyzer
from webshop_env.search.analyzer import MAX_TOKEN_LENGTH, STOP_WORDS, analyze, tokenize
from webshop_env.search.stemmer import stem
from webshop_env.search.word_break import OTHER, RANGES, ClassTable

# Word and stem as in M. F. Porter, "An algorithm for suffix stripping" (1980), step by step; where the paper shows
# what one step does, here stands what is left after all of them.
PUBLISHED = """
caresses caress, ponies poni, ties ti, caress caress, cats cat,
feed feed, agreed agre, plastered plaster, bled bled, motoring motor, sing sing,
conflated conflat, troubled troubl, sized size, hopping hop, tanned tan, falling fall, hissing hiss, fizzed fizz,
failing fail, filing file, happy happi, sky sky,
relational relat, conditional condit, rational ration, valenci valenc, hesitanci hesit, digitizer digit,
conformabli conform, radicalli radic, differentli differ, vileli vile, analogousli analog, vietnamization vietnam,
predication predic, operator oper, feudalism feudal, decisiveness decis, hopefulness hope, callousness callous,
formaliti formal, sensitiviti sensit, sensibiliti sensibl,
triplicate triplic, formative form, formalize formal, electriciti electr, electrical electr, hopeful hope,
goodness good,
revival reviv, allowance allow, inference infer, airliner airlin, gyroscopic gyroscop, adjustable adjust,
defensible defens, irritant irrit, replacement replac, adjustment adjust, dependent depend, adoption adopt,
homologou homolog, communism commun, activate activ, angulariti angular, homologous homolog, effective effect,
bowdlerize bowdler,
probate probat, rate rate, cease ceas, controll control, roll roll,
generalizations gener, oscillators oscil
"""


@pytest.mark.parametrize("pair", PUBLISHED.replace("\n", " ").split(","))
def test_published_words_get_their_published_stems(pair: str) -> None:
    word, expected = pair.split()
    assert stem(word) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("us", "us"),  # the paper's rules alone would cut the s
        ("as", "as"),
        ("is", "is"),
        ("assembly", "assembl"),  # -bli, not only -abli
        ("technology", "technolog"),  # -logi
        ("by", "by"),
        ("toys", "toi"),
        ("yay", "yai"),  # y is a consonant at the start, a vowel after one
        ("13.5", "13.5"),
        ("b12s", "b12"),
    ],
)
def test_the_departures_of_porters_own_release(word: str, expected: str) -> None:
    assert stem(word) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Men's shoes, size 9.5", ["Men's", "shoes", "size", "9.5"]),
        ("finish:solid 3:1 a.b 1,000.5", ["finish:solid", "3", "1", "a.b", "1,000.5"]),
        ("wi-fi 12-inch 4x4", ["wi", "fi", "12", "inch", "4x4"]),
        ("snake_case __init__ ___ _1", ["snake_case", "__init__", "_1"]),
        ("a..b .c d. 'e'", ["a", "b", "c", "d", "e"]),
        ("", []),
        ("- / ( ) &", []),
        ("50\u2033 \u00bd \u00b0c \u2122", ["50", "c", "\u2122"]),
        ("women\u2019s caf\u00e9 nai\u0308ve", ["women\u2019s", "caf\u00e9", "nai\u0308ve"]),
        ("soft\u00adware zero\u200bwidth", ["soft\u00adware", "zero", "width"]),
        ("\u2605star\u2764\ufe0flove", ["\u2605", "star", "\u2764\ufe0f", "love"]),
        ("\U0001f44d\U0001f3fd\U0001f44d", ["\U0001f44d\U0001f3fd", "\U0001f44d"]),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467!", ["\U0001f468\u200d\U0001f469\u200d\U0001f467"]),
        ("\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7\U0001f1eb", ["\U0001f1e9\U0001f1ea", "\U0001f1eb\U0001f1f7"]),
        ("#\ufe0f\u20e3 1\u20e3", ["#\ufe0f\u20e3", "1\u20e3"]),
        ("\u5bb6\u5177\u3044\u3059", ["\u5bb6", "\u5177", "\u3044", "\u3059"]),
        ("\u30c6\u30fc\u30d6\u30eb table", ["\u30c6\u30fc\u30d6\u30eb", "table"]),
        ("\u0e42\u0e15\u0e4a\u0e30\u0e02\u0e32\u0e27", ["\u0e42\u0e15\u0e4a\u0e30\u0e02\u0e32\u0e27"]),
        ("\uac00\uad6c 1\uac1c", ["\uac00\uad6c", "1\uac1c"]),
        ("\uff11\uff12 \uff21", ["\uff11\uff12", "\uff21"]),
        ("\u05e6\u05d4\u05f4\u05dc \u05d2' \u05d0\"\u05d1", ["\u05e6\u05d4\u05f4\u05dc", "\u05d2'", '\u05d0"\u05d1']),
        ("\u05d0''\u05d1", ["\u05d0'", "\u05d1"]),
        ("_\u0e31 _\u200d\U0001f44d", ["\u0e31", "\u200d\U0001f44d"]),
        ("\u2139\ufe0f\u200d\U0001f44d \u2139nfo", ["\u2139\ufe0f\u200d\U0001f44d", "\u2139nfo"]),
    ],
)
def test_words_are_cut_by_unicode_annex_29(text: str, expected: list[str]) -> None:
    assert tokenize(text) == expected


def test_plain_text_and_text_with_a_foreign_letter_are_cut_alike() -> None:
    # The first goes through the pattern for ASCII, the second through the table of character classes.
    signs = "a1_.:,;'\"-#* "
    texts = [x + y + z + w for x in signs for y in signs for z in signs for w in "a1_.'"]
    for text in texts:
        assert tokenize(text + " \u00e9") == [*tokenize(text), "\u00e9"], repr(text)


def test_long_tokens_are_cut_into_pieces_of_255_units() -> None:
    assert [len(token) for token in tokenize("a" * 600)] == [255, 255, 90]
    assert [len(token) for token in tokenize("\u00e9" * 300 + " b")] == [255, 45, 1]
    beyond = "\U00010400" * 200  # a letter of two units: 127 fit, none is split
    assert [len(token) for token in tokenize(beyond)] == [127, 73]
    assert [len(token) for token in tokenize("a" * 254 + "." + "b" * 10)] == [254, 10]
    assert tokenize("a" * MAX_TOKEN_LENGTH) == ["a" * MAX_TOKEN_LENGTH]


def test_possessives_case_and_stop_words_go() -> None:
    assert analyze("The Women\u2019s dresses ARE in Men's sizes") == ["women", "dress", "men", "size"]
    assert len(STOP_WORDS) == 33
    assert analyze(" ".join(STOP_WORDS)) == []
    assert analyze("it's") == []  # a stop word once the 's is off
    assert analyze("\u0130zm\u0130r") == ["izmir"]


def analyze_whole(text: str) -> list[str]:
    """As the four steps are told: the whole text is cut at once, and nothing is remembered."""
    return [term for term in map(analyzer._term.__wrapped__, tokenize(text)) if term is not None]


# One character of every class, letters of both cases, what only looks like a blank, and ends that the stemmer cuts.
SIGNS = sorted({chr(int(listed.split()[0].split("-")[0], 16)) for listed in RANGES.values()})
PARTS = [*SIGNS, *" \t\n\u00a0\u202f\u3000aZé.:'’\"_-,;", "\u200d", "ing", "es", "'S", "the", "x" * 254, "\U0001f44d"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PARTS), st.just(" "), st.characters()), max_size=25).map("".join))
def test_pieces_between_blanks_give_the_terms_of_the_whole_text(text: str) -> None:
    assert analyze(text) == analyze(text) == analyze_whole(text)


def test_real_documents_give_the_same_terms_piece_by_piece_and_whole(reference_dir: Path) -> None:
    for product in load_catalog(reference_dir / "webshop-1k").products.values():
        text = index_document(product)
        assert analyze(text) == analyze_whole(text), product.asin


def test_a_bounded_number_of_pieces_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = analyzer._PieceTerms()
    monkeypatch.setattr(analyzer, "_PIECES", pieces)
    monkeypatch.setattr(analyzer, "MAX_KEPT_PIECES", 3)
    long_word = "a" * 300
    for _ in range(2):
        assert analyze(f"{long_word} red reds lamps Desks") == ["a" * 255, "a" * 45, "red", "red", "lamp", "desk"]
    assert list(pieces) == ["red", "reds", "lamps"]


def test_a_hundred_thousand_signs_take_no_more_than_a_moment() -> None:
    start = time.perf_counter()
    for text in ("_" * 100_000, "a." * 50_000, "\u203f" * 100_000, "\U0001f44d\u200d" * 50_000, "'" * 100_000):
        analyze(text)
    assert time.perf_counter() - start < 5


def test_character_classes_do_not_overlap_and_are_unicode_9() -> None:
    classes = ClassTable()
    num_listed = 0
    for listed in RANGES.values():
        for text in listed.split():
            first, _, last = text.partition("-")
            num_listed += int(last or first, 16) - int(first, 16) + 1
    assert num_listed == sum(classes[code_point] != OTHER for code_point in range(0x110000))
    assert classes[ord("\u1c90")] == OTHER  # Georgian capital, new in Unicode 11
    assert classes[0x1FAF0] == "P"  # a hand, new in Unicode 14


def test_every_recorded_document_gives_the_recorded_terms(reference_dir: Path) -> None:
    catalog = load_catalog(reference_dir / "webshop-1k", version="v0")
    num_documents = 0
    with gzip.open(reference_dir / "golden" / "doc_tokens.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            terms = analyze(index_document(catalog.products[record["asin"]]))
            assert terms == record["tokens"], record["asin"]
            num_documents += 1
    assert num_documents == 500
