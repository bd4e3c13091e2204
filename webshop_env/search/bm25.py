"""Embedded BM25 search that returns Lucene's ranking, scores included, without Java.

All the odd steps are Lucene's: document lengths are kept in one byte, scores of single terms are float32 and added in
double precision, and a repeated query term counts as a weight.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from webshop_env.search.analyzer import analyze
from webshop_env.search.base import IndexMismatchError, QueryTooLongError, require_catalogue

# Dimensions: N documents in ascending order of asin, T terms, P postings (pairs of term and document).

MAX_QUERY_TERMS = 1024
_FORMAT = "shopgym-bm25-1"
_EXACT_LENGTHS = 24


def length_to_byte(length: int) -> int:
    """Squeeze a document length into a byte: exact below 40, above it four significant bits (Lucene's `SmallFloat`)."""
    if length < _EXACT_LENGTHS:
        return length
    rest = length - _EXACT_LENGTHS
    shift = max(rest.bit_length() - 4, -1)
    if shift < 0:
        return _EXACT_LENGTHS + rest
    return _EXACT_LENGTHS + ((rest >> shift) & 7 | (shift + 1) << 3)


def byte_to_length(byte: int) -> int:
    """Return the length that a byte of `length_to_byte` stands for: the smallest that it is given to."""
    if byte < _EXACT_LENGTHS:
        return byte
    code = byte - _EXACT_LENGTHS
    shift = (code >> 3) - 1
    return _EXACT_LENGTHS + (code & 7 if shift < 0 else (code & 7 | 8) << shift)


LENGTHS = np.array([byte_to_length(byte) for byte in range(256)], dtype=np.float32)
"""float32 [256], document length in tokens for each length byte."""


class BM25Index:
    """Inverted index over the documents of one catalogue. Made by `build` or `load`; never changes afterwards."""

    def __init__(
        self,
        asins: Sequence[str],
        terms: Sequence[str],
        *,
        starts: np.ndarray,
        docs: np.ndarray,
        tfs: np.ndarray,
        length_bytes: np.ndarray,
        num_tokens: int,
        k1: float,
        b: float,
        catalogue_hash: str,
    ) -> None:
        """Take over finished arrays; callers use `build` or `load`.

        Args:
            asins: N asins, ascending.
            terms: T terms; term i has the postings starts[i]:starts[i + 1].
            starts: int64 [T + 1].
            docs: int32 [P], places in `asins`, ascending within a term.
            tfs: int32 [P], how often the term occurs in the document, at least 1.
            length_bytes: uint8 [N], document lengths as `length_to_byte` gives them.
            num_tokens: tokens of all documents together.
            k1: how slowly repeated terms saturate, above 0.
            b: share of the length in the normalisation, in [0, 1].
            catalogue_hash: names the catalogue that the documents come from.
        """
        self._asins = tuple(asins)
        self._terms = tuple(terms)
        self._term_ids = {term: term_id for term_id, term in enumerate(self._terms)}
        self._starts, self._docs, self._tfs, self._length_bytes = starts, docs, tfs, length_bytes
        self._num_tokens = num_tokens
        self._k1, self._b = k1, b
        self.catalogue_hash = catalogue_hash

        num_filled = max(int(np.count_nonzero(length_bytes)), 1)  # Lucene counts documents that have any term
        one, k1_32, b_32 = np.float32(1), np.float32(k1), np.float32(b)
        average = np.float32(num_tokens / num_filled)
        inverse_norms = one / (k1_32 * ((one - b_32) + b_32 * LENGTHS / (average or one)))  # [256]
        self._saturations = one + tfs.astype(np.float32) * inverse_norms[length_bytes[docs]]  # [P]
        counts = np.diff(starts).astype(np.float64)
        self._idfs = np.log(1 + (num_filled - counts + 0.5) / (counts + 0.5)).astype(np.float32)  # [T]

    @classmethod
    def build(
        cls,
        docs: Sequence[str],
        asins: Sequence[str],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        catalogue_hash: str | None = None,
    ) -> BM25Index:
        """Index one text per product.

        Args:
            docs: N texts; an empty one is allowed and is never found.
            asins: N asins, all different, in the order of `docs`.
            k1: how slowly repeated terms saturate, above 0; the benchmark's value is 0.9.
            b: share of the length in the normalisation, in [0, 1]; the benchmark's value is 0.4.
            catalogue_hash: names the catalogue; without it, a hash of the asins and texts.

        Raises:
            ValueError: if there are not as many asins as texts, an asin comes twice, or k1 or b is out of range.
        """
        if len(docs) != len(asins):
            raise ValueError(f"as many asins as documents are needed, got {len(asins)} and {len(docs)}")
        if not k1 > 0 or not 0 <= b <= 1:
            raise ValueError(f"k1 must be above 0 and b in [0, 1], got k1={k1} and b={b}")
        order = sorted(range(len(asins)), key=asins.__getitem__)
        for left, right in pairwise(order):
            if asins[left] == asins[right]:
                raise ValueError(f"asin {asins[left]} comes twice; every product needs its own")

        term_ids: dict[str, int] = {}
        posting_terms: list[int] = []
        posting_tfs: list[int] = []
        doc_sizes, lengths = [], []
        for place in order:
            tokens = analyze(docs[place])
            counts = Counter(tokens)
            posting_terms += [term_ids.setdefault(term, len(term_ids)) for term in counts]
            posting_tfs += counts.values()
            doc_sizes.append(len(counts))
            lengths.append(len(tokens))

        posting_term_array = np.array(posting_terms, dtype=np.int64)  # [P], by document
        by_term = np.argsort(posting_term_array, kind="stable")  # keeps documents ascending
        posting_docs = np.repeat(np.arange(len(order), dtype=np.int32), doc_sizes)  # [P]
        starts = np.zeros(len(term_ids) + 1, dtype=np.int64)
        np.cumsum(np.bincount(posting_term_array, minlength=len(term_ids)), out=starts[1:])
        return cls(
            [asins[place] for place in order],
            list(term_ids),
            starts=starts,
            docs=posting_docs[by_term],
            tfs=np.array(posting_tfs, dtype=np.int32)[by_term],
            length_bytes=np.array([length_to_byte(length) for length in lengths], dtype=np.uint8),
            num_tokens=sum(lengths),
            k1=k1,
            b=b,
            catalogue_hash=_hash_of(docs, asins) if catalogue_hash is None else catalogue_hash,
        )

    @property
    def num_docs(self) -> int:
        return len(self._asins)

    @property
    def num_terms(self) -> int:
        return len(self._terms)

    @property
    def num_postings(self) -> int:
        """Pairs of a term and a document that holds it."""
        return len(self._docs)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return self._num_tokens

    def search(self, query: str, k: int = 50, *, truncate: bool = False) -> list[tuple[str, float]]:
        """Rank the documents for a query.

        Args:
            query: any text; upper case does not matter.
            k: most hits to return.
            truncate: keep the first 1,024 distinct terms of a longer query instead of raising.

        Returns:
            (asin, score) by score descending, equal scores by asin ascending. Scores are float32 values. Documents
            without any of the terms are no hits; a query without terms has none.

        Raises:
            QueryTooLongError: if the query has more than 1,024 distinct terms, as in Lucene.
        """
        weights = Counter(analyze(query))
        if len(weights) > MAX_QUERY_TERMS:
            if not truncate:
                raise QueryTooLongError(
                    f"the query has {len(weights)} distinct terms, at most {MAX_QUERY_TERMS} are allowed; shorten it"
                )
            weights = Counter(dict(islice(weights.items(), MAX_QUERY_TERMS)))

        scores = np.zeros(self.num_docs, dtype=np.float64)
        is_hit = np.zeros(self.num_docs, dtype=bool)
        for term, count in weights.items():
            term_id = self._term_ids.get(term)
            if term_id is None:
                continue
            postings = slice(self._starts[term_id], self._starts[term_id + 1])
            docs = self._docs[postings]
            weight = np.float32(count) * self._idfs[term_id]
            scores[docs] += weight - weight / self._saturations[postings]  # float32 terms, double sum
            is_hit[docs] = True
        hits = np.flatnonzero(is_hit)
        if k <= 0 or not hits.size:
            return []
        hit_scores = scores[hits].astype(np.float32)
        if hits.size > 4 * k:  # sort only what can be among the first k
            kth_best = np.partition(hit_scores, hits.size - k)[hits.size - k]
            is_candidate = hit_scores >= kth_best
            hits, hit_scores = hits[is_candidate], hit_scores[is_candidate]
        best = np.argsort(-hit_scores, kind="stable")[:k]  # documents ascend by asin, so ties do too
        asins = map(self._asins.__getitem__, hits[best].tolist())
        return list(zip(asins, hit_scores[best].tolist(), strict=True))

    def save(self, path: str | Path) -> None:
        """Write the index to one file, whole or not at all: readers never see half of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(
                    file,
                    format=np.array(_FORMAT),
                    catalogue_hash=np.array(self.catalogue_hash),
                    asins=_pack(self._asins),
                    terms=_pack(self._terms),
                    starts=self._starts,
                    docs=self._docs,
                    tfs=self._tfs,
                    length_bytes=self._length_bytes,
                    num_tokens=np.array(self._num_tokens),
                    k1=np.array(self._k1),
                    b=np.array(self._b),
                )
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | Path, catalogue_hash: str) -> BM25Index:
        """Read an index that `save` wrote for this catalogue.

        Raises:
            IndexMismatchError: if the file is damaged, of another format, or was built from another catalogue.
            FileNotFoundError: if there is no such file.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            found_format = str(arrays["format"])
            if found_format != _FORMAT:
                raise IndexMismatchError(f"{path}: format {found_format} is not {_FORMAT}; build the index again")
            require_catalogue(str(arrays["catalogue_hash"]), catalogue_hash, str(path))
            return cls(
                _unpack(arrays["asins"]),
                _unpack(arrays["terms"]),
                **{name: arrays[name] for name in ("starts", "docs", "tfs", "length_bytes")},
                num_tokens=int(arrays["num_tokens"]),
                k1=float(arrays["k1"]),
                b=float(arrays["b"]),
                catalogue_hash=catalogue_hash,
            )
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, IndexMismatchError):
                raise
            raise IndexMismatchError(f"{path}: not a search index ({error}); build the index again") from error


class BM25Search:
    """A `BM25Index` as a `SearchEngine`: asins only.

    Args:
        index: what to search in.
        truncate_long_queries: search for the first 1,024 distinct terms of a longer query instead of raising
            `QueryTooLongError`.
    """

    def __init__(self, index: BM25Index, *, truncate_long_queries: bool = False) -> None:
        self.index = index
        self._truncate = truncate_long_queries

    @property
    def catalogue_hash(self) -> str:
        return self.index.catalogue_hash

    def search(self, query: str, k: int = 50) -> tuple[str, ...]:
        return tuple(asin for asin, _ in self.index.search(query, k, truncate=self._truncate))


def _hash_of(docs: Sequence[str], asins: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for asin, doc in zip(asins, docs, strict=True):
        for text in (asin, doc):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _pack(texts: Sequence[str]) -> np.ndarray:
    """Store texts as bytes with line feeds between: neither asins nor terms hold one."""
    return np.frombuffer("\n".join(texts).encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _unpack(packed: np.ndarray) -> list[str]:
    text = packed.tobytes().decode("utf-8", "surrogatepass")
    return text.split("\n") if text else []
