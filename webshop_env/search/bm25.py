"""Embedded BM25 search that returns Lucene's ranking, scores included, without Java.

All the odd steps are Lucene's: document lengths are kept in one byte, scores of single terms are float32 and added in
double precision, and a repeated query term counts as a weight.

In large catalogues only documents that can be among the best are scored. A posting's share of its term's weight, the
*impact*, is kept rounded up to a byte too; sums of whole numbers bound the scores of all documents from above.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from webshop_env.search.analyzer import analyze
from webshop_env.search.base import IndexMismatchError, QueryTooLongError
from webshop_env.search.postings import asin_order, hash_order, invert, read_documents
from webshop_env.table_file import TableError, TableFile, write_table

# Dimensions: N documents in ascending order of asin, T terms in ascending order of their CRC-32, P postings (pairs of
# term and document), C codes (pairs of frequency and length, in ascending order of impact), D dense terms.

MAX_QUERY_TERMS = 1024
_KIND = "bm25-index-2"
"""The number changes when arrays or their meaning do."""
_EXACT_LENGTHS = 24

_ARRAYS = (
    *("asins", "term_hashes", "term_bytes", "term_ends", "idfs", "starts", "docs", "codes", "saturations", "impacts"),
    *("dense_terms", "dense_rows"),
)

PRUNED_DOCS = 20_000
"""With fewer documents all that hold a term are scored; bounds would cost more than they save."""
_DENSE_SHARE = 16
"""A term in more than one of so many documents has its impacts on all documents as a row of bytes."""
_GROUP_SIZE = 256
"""So many documents share a place in the list of highest bounds, from which the threshold is taken."""
_BLOCK_SIZE = 1 << 17
"""So many documents get the impacts of all dense terms before the next ones do: as many as a core's cache holds."""
_IMPACT_STEPS = 254
"""Impacts 0 to 1 are 1 to 255 in bytes; 0 says that the term is absent."""


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
        arrays: Mapping[str, np.ndarray],
        *,
        num_tokens: int,
        catalogue_hash: str,
    ) -> None:
        """Take over finished arrays; callers use `build` or `load`. Nothing is read from them here.

        Args:
            arrays:
                asins: bytes [N], UTF-8, each with a full stop behind it, as arrays of bytes drop zeros at the end;
                term_hashes: uint32 [T]; term_bytes: uint8, the terms in UTF-8; term_ends: int64 [T + 1], where
                they end in it, after a 0;
                idfs: float32 [T]; starts: int64 [T + 1]: term i has the postings starts[i]:starts[i + 1];
                docs: int32 [P], ascending within a term; codes: uint [P], places in the next two;
                saturations: float32 [C], 1 + frequency / length norm; impacts: uint8 [C];
                dense_terms: int64 [D]; dense_rows: uint8 [D * N], their impacts on all documents.
            num_tokens: tokens of all documents together.
            catalogue_hash: names the catalogue that the documents come from.
        """
        self._arrays = dict(arrays)
        self._asins, self._idfs = arrays["asins"], arrays["idfs"]
        # Of these single numbers are taken, for which views are faster than arrays.
        self._starts, self._term_hashes = arrays["starts"].data, arrays["term_hashes"].data
        self._term_ends, self._term_bytes = arrays["term_ends"].data, arrays["term_bytes"].data
        self._docs, self._codes = arrays["docs"], arrays["codes"]
        self._saturations, self._impacts = arrays["saturations"], arrays["impacts"]
        rows = arrays["dense_rows"].reshape(-1, max(self.num_docs, 1))
        self._dense_rows = dict(zip(arrays["dense_terms"].tolist(), rows, strict=True))
        self._buffers = threading.local()
        self._num_tokens = num_tokens
        self.catalogue_hash = catalogue_hash

    @classmethod
    def build(
        cls,
        docs: Iterable[str],
        asins: Iterable[str],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        catalogue_hash: str | None = None,
    ) -> BM25Index:
        """Index one text per product. Texts are taken one by one; memory grows with what is kept of them.

        Args:
            docs: N texts; an empty one is allowed and is never found.
            asins: N asins, all different, in the order of `docs`.
            k1: how slowly repeated terms saturate, above 0; the benchmark's value is 0.9.
            b: share of the length in the normalisation, in [0, 1]; the benchmark's value is 0.4.
            catalogue_hash: names the catalogue; without it, a hash of the asins and texts.

        Raises:
            ValueError: if there are not as many asins as texts, an asin comes twice, or k1 or b is out of range.
        """
        if not k1 > 0 or not 0 <= b <= 1:
            raise ValueError(f"k1 must be above 0 and b in [0, 1], got k1={k1} and b={b}")
        documents = read_documents(docs, asins, with_hash=catalogue_hash is None)
        order = asin_order(documents.asins)
        term_order, term_hashes = hash_order(documents.terms)
        terms = [documents.terms[place] for place in term_order]
        term_ends = np.cumsum([0, *map(len, terms)], dtype=np.int64)
        different, places = np.unique(documents.lengths, return_inverse=True)
        length_bytes = np.array([length_to_byte(length) for length in different.tolist()], dtype=np.uint8)[places]
        num_tokens = int(documents.lengths.sum())
        num_filled = max(int(np.count_nonzero(documents.lengths)), 1)  # Lucene counts documents that have any term

        postings = invert(documents, order=order, term_order=term_order, length_bytes=length_bytes)
        one, k1_32, b_32 = np.float32(1), np.float32(k1), np.float32(b)
        average = np.float32(num_tokens / num_filled)
        with np.errstate(divide="ignore"):  # by the norm of an empty document, which no posting has
            inverse_norms = one / (k1_32 * ((one - b_32) + b_32 * LENGTHS / (average or one)))  # [256]
        saturations = one + postings.tfs.astype(np.float32) * inverse_norms[postings.length_bytes]
        saturations, codes = np.unique(saturations, return_inverse=True)  # [C]
        counts = np.diff(postings.starts).astype(np.float64)
        # Rounded up, with some to spare for the float32 arithmetic of scores.
        impacts = np.ceil(_IMPACT_STEPS * (1 - 1 / saturations.astype(np.float64)) + 1e-3).astype(np.uint8)
        arrays = {
            "asins": _packed_asins([documents.asins[place] for place in order]),
            "term_hashes": term_hashes,
            "term_bytes": np.frombuffer(b"".join(terms), dtype=np.uint8),
            "term_ends": term_ends,
            "idfs": np.log(1 + (num_filled - counts + 0.5) / (counts + 0.5)).astype(np.float32),
            "starts": postings.starts,
            "docs": postings.docs,
            "codes": codes.astype(np.min_scalar_type(max(len(saturations) - 1, 0)))[postings.codes],
            "saturations": saturations,
            "impacts": impacts,
        }
        return cls(
            {**arrays, **_dense(arrays, len(order))},
            num_tokens=num_tokens,
            catalogue_hash=documents.content_hash if catalogue_hash is None else catalogue_hash,
        )

    @property
    def num_docs(self) -> int:
        return len(self._asins)

    @property
    def num_terms(self) -> int:
        return len(self._idfs)

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
        counts = Counter(analyze(query))
        if len(counts) > MAX_QUERY_TERMS:
            if not truncate:
                raise QueryTooLongError(
                    f"the query has {len(counts)} distinct terms, at most {MAX_QUERY_TERMS} are allowed; shorten it"
                )
            counts = Counter(dict(islice(counts.items(), MAX_QUERY_TERMS)))
        weights: dict[int, np.float32] = {}
        for term, count in counts.items():
            term_id = self._term_id(term)
            if term_id is not None:
                weights[term_id] = np.float32(count) * self._idfs[term_id]
        if k <= 0 or not weights:
            return []
        if self.num_docs < PRUNED_DOCS or k * _GROUP_SIZE > self.num_docs:
            hits, scores = self._score_all(weights)
        else:
            hits, scores = self._score_best(weights, k)
        if hits.size > 4 * k:  # sort only what can be among the first k
            is_candidate = scores >= _kth_largest(scores, k)
            hits, scores = hits[is_candidate], scores[is_candidate]
        best = np.argsort(-scores, kind="stable")[:k]  # documents ascend by asin, so ties do too
        return list(zip(self._asins_of(hits[best]), scores[best].tolist(), strict=True))

    def _asins_of(self, docs: np.ndarray) -> list[str]:
        packed = self._asins[docs].tolist()
        try:
            return [asin[:-1].decode() for asin in packed]
        except UnicodeDecodeError:  # half a surrogate pair, which odd files may hold
            return [asin[:-1].decode("utf-8", "surrogatepass") for asin in packed]

    def _term_id(self, term: str) -> int | None:
        text = term.encode("utf-8", "surrogatepass")
        checksum = zlib.crc32(text)
        term_id = bisect_left(self._term_hashes, checksum)
        while term_id < self.num_terms and self._term_hashes[term_id] == checksum:
            if self._term_bytes[self._term_ends[term_id] : self._term_ends[term_id + 1]] == text:
                return term_id
            term_id += 1
        return None

    def _postings(self, term_id: int) -> tuple[np.ndarray, np.ndarray]:
        places = slice(self._starts[term_id], self._starts[term_id + 1])
        return self._docs[places], self._codes[places]

    def _score_all(self, weights: Mapping[int, np.float32]) -> tuple[np.ndarray, np.ndarray]:
        """Every document that holds a term, ascending, and its score (float32)."""
        scores = np.zeros(self.num_docs, dtype=np.float64)
        is_hit = np.zeros(self.num_docs, dtype=bool)
        for term_id, weight in weights.items():
            docs, codes = self._postings(term_id)
            scores[docs] += weight - weight / self._saturations[codes]  # float32 terms, double sum
            is_hit[docs] = True
        hits = np.flatnonzero(is_hit)
        return hits, scores[hits].astype(np.float32)

    def _score_some(self, docs: np.ndarray, weights: Mapping[int, np.float32]) -> np.ndarray:
        """Scores (float32) of some documents, ascending: the same sums as in `_score_all`."""
        docs = docs.astype(np.int32)
        scores = np.zeros(len(docs), dtype=np.float64)
        for term_id, weight in weights.items():
            with_term, codes = self._postings(term_id)
            places = np.searchsorted(with_term, docs)
            places[places == len(with_term)] = 0
            is_there = with_term[places] == docs
            scores[is_there] += weight - weight / self._saturations[codes[places[is_there]]]
        return scores.astype(np.float32)

    def _score_best(self, weights: Mapping[int, np.float32], k: int) -> tuple[np.ndarray, np.ndarray]:
        """At least every document that is among the best k or equals the last of them, ascending, and its score."""
        bounds, scale = self._bounds(weights)
        group_best = bounds.max(axis=0)
        least = max(int(_kth_largest(group_best, k)), 1)  # k documents at least have this bound
        docs = _at_least(bounds, group_best, least)
        scores = self._score_some(docs, weights)
        if len(docs) >= k:
            kth_best = float(_kth_largest(scores, k))
            enough = int(kth_best * scale * (1 - 1e-6))  # scores are rounded by less than a millionth
        else:
            enough = 1
        if enough < least:
            docs = _at_least(bounds, group_best, max(enough, 1))
            scores = self._score_some(docs, weights)
        return docs, scores

    def _bounds(self, weights: Mapping[int, np.float32]) -> tuple[np.ndarray, float]:
        """Whole numbers that bound the scores of all documents.

        Returns:
            uint [_GROUP_SIZE, N / _GROUP_SIZE rounded up], by document, and how much a score of 1 is in them. A
            document has bound 0 only if it holds none of the terms.
        """
        num_bytes = 2 if len(weights) <= 16 else 4
        dtype = np.dtype(f"u{num_bytes}")
        room = (256**num_bytes - 1) // 255 - len(weights)  # every weight is rounded up
        scale = room / sum(map(float, weights.values()))
        num_groups = -(-self.num_docs // _GROUP_SIZE)
        bounds = self._buffer(_GROUP_SIZE * num_groups, dtype)
        bounds.fill(0)
        factors = {term_id: dtype.type(np.ceil(float(weight) * scale)) for term_id, weight in weights.items()}
        dense = [
            (self._dense_rows[term_id], factor) for term_id, factor in factors.items() if term_id in self._dense_rows
        ]
        product = np.empty(_BLOCK_SIZE, dtype=dtype)
        for first in range(0, self.num_docs if dense else 0, _BLOCK_SIZE):
            block = bounds[first : min(first + _BLOCK_SIZE, self.num_docs)]
            for row, factor in dense:
                np.multiply(row[first : first + _BLOCK_SIZE], factor, out=product[: len(block)], dtype=dtype)
                block += product[: len(block)]
        for term_id, factor in factors.items():
            if term_id not in self._dense_rows:
                docs, codes = self._postings(term_id)
                np.add.at(bounds, docs, (self._impacts * factor)[codes])
        return bounds.reshape(_GROUP_SIZE, num_groups), scale * _IMPACT_STEPS

    def _buffer(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Memory that the next search of this thread uses again: to ask for it anew takes longer than to fill it."""
        buffer = getattr(self._buffers, dtype.name, None)
        if buffer is None:
            buffer = np.empty(size, dtype=dtype)
            setattr(self._buffers, dtype.name, buffer)
        return buffer

    def save(self, path: str | Path) -> None:
        """Write the index to one file, whole or not at all: readers never see half of it."""
        with write_table(Path(path), _KIND, self.catalogue_hash) as table:
            table.facts = {"num_tokens": self._num_tokens}
            for name, array in self._arrays.items():
                table.put(name, array)

    @classmethod
    def load(cls, path: str | Path, catalogue_hash: str) -> BM25Index:
        """Open an index that `save` wrote for this catalogue; its arrays are memory-mapped.

        Raises:
            IndexMismatchError: if the file is damaged, of another format, or was built from another catalogue.
            FileNotFoundError: if there is no such file.
        """
        try:
            table = TableFile(Path(path), _KIND, catalogue_hash)
            arrays = {name: table.array(name) for name in _ARRAYS}
            return cls(arrays, num_tokens=table.facts["num_tokens"], catalogue_hash=catalogue_hash)
        except TableError as error:
            raise IndexMismatchError(str(error)) from None


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


def _packed_asins(asins: list[str]) -> np.ndarray:
    return np.array([asin.encode("utf-8", "surrogatepass") + b"." for asin in asins] or [b""])[: len(asins)]


def _dense(arrays: Mapping[str, np.ndarray], num_docs: int) -> dict[str, np.ndarray]:
    """Rows of the terms that many documents hold; none for a small catalogue."""
    starts = arrays["starts"]
    terms = np.flatnonzero(np.diff(starts) > num_docs // _DENSE_SHARE) if num_docs >= PRUNED_DOCS else np.arange(0)
    rows = np.zeros((len(terms), num_docs), dtype=np.uint8)
    for row, term_id in zip(rows, terms, strict=True):
        places = slice(starts[term_id], starts[term_id + 1])
        row[arrays["docs"][places]] = arrays["impacts"][arrays["codes"][places]]
    return {"dense_terms": terms, "dense_rows": rows.reshape(-1)}


def _kth_largest(values: np.ndarray, k: int) -> np.number:
    return np.partition(values, len(values) - k)[len(values) - k]


def _at_least(bounds: np.ndarray, group_best: np.ndarray, least: int) -> np.ndarray:
    """Documents, ascending, whose bound is at least `least`; `group_best` holds the highest of each column."""
    columns = np.flatnonzero(group_best >= least)
    if 8 * len(columns) > len(group_best):
        return np.flatnonzero(bounds.reshape(-1) >= least)
    rows, places = np.nonzero(bounds[:, columns] >= least)
    return rows * len(group_best) + columns[places]
