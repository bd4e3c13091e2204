"""Porter's stemmer in the variant of its author's own release, as Lucene's English analyzer uses it.

It departs from the published paper in three places: words of one or two letters stay as they are, "-bli" (not only
"-abli") becomes "-ble", and "-logi" becomes "-log". See https://tartarus.org/martin/PorterStemmer/, "points of
difference". Libraries that call their stemmer "porter" usually follow the paper and give other stems.

Throughout, a word is carried together with its *form*: one letter per letter, "v" for a vowel and "c" for a consonant.
The number of "vc" in a form is Porter's measure m.
"""

from __future__ import annotations

_STEP_2 = {
    "ational": "ate",
    "tional": "tion",
    "enci": "ence",
    "anci": "ance",
    "izer": "ize",
    "bli": "ble",
    "alli": "al",
    "entli": "ent",
    "eli": "e",
    "ousli": "ous",
    "ization": "ize",
    "ation": "ate",
    "ator": "ate",
    "alism": "al",
    "iveness": "ive",
    "fulness": "ful",
    "ousness": "ous",
    "aliti": "al",
    "iviti": "ive",
    "biliti": "ble",
    "logi": "log",
}
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP_4 = (
    "al",
    "ance",
    "ence",
    "er",
    "ic",
    "able",
    "ible",
    "ant",
    "ement",
    "ment",
    "ent",
    "sion",
    "tion",
    "ou",
    "ism",
    "ate",
    "iti",
    "ous",
    "ive",
    "ize",
)


def _by_last_letters(suffixes: list[str]) -> dict[str, tuple[str, ...]]:
    """Group suffixes by their last two letters, longest first, so that few are tried per word."""
    groups: dict[str, list[str]] = {}
    for suffix in sorted(suffixes, key=len, reverse=True):
        groups.setdefault(suffix[-2:], []).append(suffix)
    return {ending: tuple(group) for ending, group in groups.items()}


_STEP_2_GROUPS = _by_last_letters(list(_STEP_2))
_STEP_3_GROUPS = _by_last_letters(list(_STEP_3))
_STEP_4_GROUPS = _by_last_letters(list(_STEP_4))


def _form(word: str, known: str = "") -> str:
    """Spell out which letters are vowels, going on from the form of a prefix.

    A "y" is a vowel after a consonant; all that is no a, e, i, o, u, y counts as a consonant, digits and signs too.
    """
    form = known
    for letter in word[len(known) :]:
        is_vowel = letter in "aeiou" or (letter == "y" and form[-1:] == "c")
        form += "v" if is_vowel else "c"
    return form


def _ends_with_double_consonant(word: str, form: str) -> bool:
    return len(word) >= 2 and word[-1] == word[-2] and form[-1] == "c"


def _ends_short(word: str, form: str) -> bool:
    """Consonant, vowel, consonant other than w, x, y: where a lost "e" is put back ("hop" from "hoping")."""
    return form.endswith("cvc") and word[-1] not in "wxy"


def _matching(word: str, groups: dict[str, tuple[str, ...]]) -> str | None:
    for suffix in groups.get(word[-2:], ()):
        if word.endswith(suffix):
            return suffix
    return None


def _plural_and_past(word: str, form: str) -> tuple[str, str]:
    """Steps 1a to 1c: plurals, -ed, -ing, and a final "y" that becomes "i"."""
    if word.endswith("s"):
        if word.endswith(("sses", "ies")):
            word = word[:-2]
        elif not word.endswith("ss"):
            word = word[:-1]
        form = form[: len(word)]
    if word.endswith("eed"):
        if "vc" in form[:-3]:
            word, form = word[:-1], form[:-1]
    else:
        length = 2 if word.endswith("ed") else 3 if word.endswith("ing") else 0
        if length and "v" in form[:-length]:
            word, form = word[:-length], form[:-length]
            if word.endswith(("at", "bl", "iz")) or (
                not _ends_with_double_consonant(word, form) and form.count("vc") == 1 and _ends_short(word, form)
            ):
                word, form = word + "e", form + "v"
            elif _ends_with_double_consonant(word, form) and word[-1] not in "lsz":
                word, form = word[:-1], form[:-1]
    if word.endswith("y") and "v" in form[:-1]:
        word, form = word[:-1] + "i", form[:-1] + "v"
    return word, form


def _replace(word: str, form: str, endings: dict[str, str], groups: dict[str, tuple[str, ...]]) -> tuple[str, str]:
    """Steps 2 and 3: the longest suffix of the table is replaced if the measure before it is above 0."""
    suffix = _matching(word, groups)
    if suffix is not None and "vc" in form[: -len(suffix)]:
        word = word[: -len(suffix)] + endings[suffix]
        form = _form(word, form[: len(word) - len(endings[suffix])])
    return word, form


def stem(word: str) -> str:
    """Reduce a lower-case word to its stem, so that "cables" finds "cable".

    Args:
        word: one token, lower case. Lengths count UTF-16 units in the original; `analyzer` sees to that.

    Returns:
        The stem; the word itself if it has at most two letters.
    """
    if len(word) <= 2:
        return word
    word, form = _plural_and_past(word, _form(word))
    word, form = _replace(word, form, _STEP_2, _STEP_2_GROUPS)
    word, form = _replace(word, form, _STEP_3, _STEP_3_GROUPS)

    suffix = _matching(word, _STEP_4_GROUPS)
    if suffix is not None:
        length = 3 if suffix in ("sion", "tion") else len(suffix)  # the s or t only has to be there
        if form[:-length].count("vc") > 1:
            word, form = word[:-length], form[:-length]

    if word.endswith("e"):
        measure = form.count("vc")
        if measure > 1 or (measure == 1 and not _ends_short(word[:-1], form[:-1])):
            word, form = word[:-1], form[:-1]
    if word.endswith("ll") and form.count("vc") > 1:
        word = word[:-1]
    return word
