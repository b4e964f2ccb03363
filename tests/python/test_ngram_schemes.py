"""Published schemes of hashed n-grams: ids that others published, any text beside plain Python, texts in pieces."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import ngram_reference as reference
import numpy as np
import pytest
import torch
from small_schemes import SMALL_DEEPSEEK, SMALL_LONGCAT, SMALL_QWEN, SMALL_SALTED, TOKEN_MAP
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from recstore_ops import DeepSeekNGrams, LongCatNGrams, NGramScheme, QwenNGrams, SaltedNGrams, XorNGrams
from recstore_ops.ngrams.generators import odd_multiplier_range, pcg64_integers, splitmix64
from recstore_ops.ngrams.primes import is_prime, largest_prime_up_to, next_prime, primes_from

pytestmark = pytest.mark.tier("quick")

DEAD, EOS = -1, 248_044


def ids(scheme: NGramScheme, text: list[int], at: int | None = None) -> Any:
    found = scheme.ids(torch.tensor(text)).tolist()
    return found if at is None else found[at]


DEEPSEEK_COLUMNS = (0, 7, 8, 15, 16, 23)
TEXT_A, TEXT_B, TEXT_C = [5, 7, 9, 11, 13], [5, DEAD, 9, 11, 13], [99_091, 0, 99_091, 1]
# Layer, text, position: the ids of some columns, and the sum of all.
DEEPSEEK: list[tuple[int, list[int], int, list[int] | None, int]] = [
    (1, TEXT_A, 0, [5412672, 127351390, 143494632, 247008214, 256353435, 372009279], 4611638733),
    (1, TEXT_A, 4, [4449004, 124752916, 141475239, 240031590, 262179719, 373317637], 4594025055),
    (1, TEXT_B, 1, [4299726, 112312540, 129401291, 250883315, 264341430, 370096053], 4603664859),
    (1, TEXT_B, 4, [4449004, 124752916, 141475239, 240031590, 265633082, 379730298], 4617619778),
    (1, TEXT_C, 0, [2008568, 125647891, 134138602, 253556857, 264495124, 370110214], 4611608336),
    (1, TEXT_C, 3, None, 4591607613),
    (14, TEXT_A, 0, [6939818, 119840903, 131576092, 243164617, 268363546, 382274687], 4609980373),
    (14, TEXT_A, 4, None, 4612595462),
    (14, TEXT_C, 3, None, 4590129768),
]


@pytest.mark.parametrize(("layer", "text", "at", "columns", "total"), DEEPSEEK)
def test_ids_of_deepseek_v4_1_flash(
    layer: int, text: list[int], at: int, columns: list[int] | None, total: int
) -> None:
    found = ids(DeepSeekNGrams.deepseek_v4_1_flash(layer), text, at)
    assert sum(found) == total
    assert columns is None or [found[column] for column in DEEPSEEK_COLUMNS] == columns


def test_numbers_of_deepseek_v4_1_flash() -> None:
    one, other = (DeepSeekNGrams.deepseek_v4_1_flash(layer) for layer in (1, 14))
    assert one.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert other.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert list(one.moduli + other.moduli) == reference.primes(16_000_000, 48)
    assert (one.moduli[0], one.moduli[-1], other.moduli[0], other.moduli[-1]) == (
        *(16_000_057, 16_000_463),
        *(16_000_477, 16_000_889),
    )
    assert (one.num_rows, other.num_rows) == (384_006_168, 384_016_682)
    assert (one.slots, one.history, one.start) == (24, 3, DEAD)
    assert one != other


# Layer: the rows at the last of three tokens, before offsets.
DEMO = {
    1: [
        *(112536, 82855, 178561, 107672, 595920, 614417, 454442, 314862),
        *(594920, 236754, 14572, 578847, 485684, 344682, 99000, 572886),
    ],
    15: [
        *(271266, 399660, 602286, 398117, 476288, 290721, 447064, 618472),
        *(446868, 211419, 382477, 271499, 232641, 50367, 473278, 220255),
    ],
}


@pytest.mark.parametrize("layer", DEMO)
def test_ids_of_the_demo_of_engram(layer: int) -> None:
    demo = DeepSeekNGrams.engram_demo(layer, compressed_vocabulary=99_092)
    found = ids(demo, [5, 7, 9], 2)
    assert [row - offset for row, offset in zip(found, demo.offsets, strict=True)] == DEMO[layer]
    assert layer == 1 or demo.multipliers == (28919099099511, 56020370062535, 53929037264533)
    assert layer == 15 or demo.multipliers == DeepSeekNGrams.deepseek_v4_1_flash(1).multipliers[:3]


# Text, position, rows.
QWEN: list[tuple[list[int], int, list[int]]] = [
    (
        [5, 7, EOS, 9, 11],
        0,
        [
            *(15389869, 39778609, 55713969, 62213332, 88817728, 118483999, 133731511, 155458159),
            *(179763390, 197956758, 205378969, 220499474, 242466248, 265658744, 293662119, 315720898),
        ],
    ),
    (
        [5, 7, EOS, 9, 11],
        3,
        [
            *(18043673, 37626835, 51159316, 78294604, 94015356, 106720349, 136526052, 144330141),
            *(176817901, 186368539, 203707490, 230017629, 247662678, 266533413, 293096193, 307951937),
        ],
    ),
]
QWEN_ENDS = [
    ([5, 7, EOS, 9, 11], 2, [10204458, 158727320, 176298516, 319927855]),
    ([248_319] * 3, 2, [3035822, 157254389, 171350132, 303365432]),
]


@pytest.mark.parametrize(("text", "at", "rows"), QWEN)
def test_ids_of_qwen3_8_flash_next(text: list[int], at: int, rows: list[int]) -> None:
    assert ids(QwenNGrams.qwen3_8_flash_next(), text, at) == rows


@pytest.mark.parametrize(("text", "at", "rows"), QWEN_ENDS)
def test_first_and_last_heads_of_qwen3_8_flash_next(text: list[int], at: int, rows: list[int]) -> None:
    found = ids(QwenNGrams.qwen3_8_flash_next(), text, at)
    assert [found[head] for head in (0, 7, 8, 15)] == rows


def test_numbers_of_qwen3_8_flash_next() -> None:
    scheme = QwenNGrams.qwen3_8_flash_next()
    assert scheme.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert list(scheme.moduli) == reference.primes(20_000_000, 16)
    assert (scheme.moduli[0], scheme.offsets[-1]) == (20_000_003, 300_001_275)
    assert (sum(scheme.moduli), scheme.num_rows) == (320_001_446, 320_001_536)
    assert (scheme.slots, scheme.history, scheme.start) == (16, 2, EOS)


LONGCAT: list[tuple[list[int], int, list[int]]] = [
    (
        [100, 200, 300, 400],
        3,
        [8651149, 8651143, 8651137, 8651131, 6150675, 5478505, 4806335, 4134165, 9139291, 1013325, 3128228, 5260367],
    ),
    (
        [131_071] * 4,
        3,
        [4192623, 4189263, 4185903, 4182543, 2401372, 1508255, 615310, 9946168, 2221096, 8628880, 6955905, 7425792],
    ),
    (
        [1, 5, 2, 9, 11],
        2,
        [655362] * 4 + [4834546, 4831186, 4827826, 4824466, 4821106, 4817746, 4814386, 4811026],
    ),
    ([1, 5, 2, 9, 11], 3, [9] * 12),
    ([1, 5, 2, 9, 11], 4, [1179659] * 12),
]


@pytest.mark.parametrize(("text", "at", "rows"), LONGCAT)
def test_ids_of_longcat_flash_lite(text: list[int], at: int, rows: list[int]) -> None:
    scheme = LongCatNGrams.longcat_flash_lite()
    assert [row - offset for row, offset in zip(ids(scheme, text, at), scheme.offsets, strict=True)] == rows
    assert scheme.moduli == tuple(range(10_223_617, 10_223_640, 2))
    assert (scheme.num_rows, scheme.slots, scheme.history, scheme.start) == (122_683_536, 12, 3, 2)


SALTED: list[tuple[list[int], int, list[int]]] = [
    ([5, 7, 9], 0, [77180965, 78216900, 38734259, 39770194]),
    ([5, 7, 9], 2, [6920886, 13988732, 13977173, 24761564]),
    ([50_256] * 3, 2, [53317191, 61451928, 69414890, 73292802]),
    ([0, 1, 50_256], 0, [0, 0, 0, 0]),
    ([0, 1, 50_256], 2, [39726481, 52861352, 56061127, 69195998]),
]


@pytest.mark.parametrize(("text", "at", "rows"), SALTED)
def test_ids_of_modded_nanogpt_366(text: list[int], at: int, rows: list[int]) -> None:
    scheme = SaltedNGrams.nanogpt_366()
    assert ids(scheme, text, at) == rows
    assert (scheme.num_rows, scheme.slots, scheme.history, scheme.start) == (79_999_987, 4, 2, 0)
    assert (scheme.orders, scheme.salts) == ((2, 2, 3, 3), (1, 7920, 98, 8017))


def test_ids_of_nanochat() -> None:
    plain = SaltedNGrams(rows=299_999_977, orders=[2, 3], salts=[0, 0])
    assert ids(plain, [5, 7, 9], 2) == [96711027, 153622987]
    assert SaltedNGrams.nanochat().num_rows == 299_999_977
    assert SaltedNGrams.nanochat(100).num_rows == 101, "an even size may give the prime above it"
    assert SaltedNGrams.nanochat().salts == SaltedNGrams.nanogpt_366().salts


XOR = [
    ([5, 7, 9], [42301439, 13442322, 400160], [84602879, 84602879, 42797295]),
    ([50_256] * 3, [42301439, 40499699, 20052728], [84602879, 84602879, 49319697]),
    ([40_000, 50_000, 3], [42301439, 36999923, 5881819], [84602879, 84602879, 68987063]),
]


@pytest.mark.parametrize(("text", "bigrams", "trigrams"), XOR)
def test_ids_of_modded_nanogpt_360(text: list[int], bigrams: list[int], trigrams: list[int]) -> None:
    scheme = XorNGrams.nanogpt_360()
    assert ids(scheme, text) == [list(pair) for pair in zip(bigrams, trigrams, strict=True)]
    assert (scheme.num_rows, scheme.slots, scheme.history) == (84_602_880, 2, 2)


By = Callable[[list[int], int], list[int]]
Case = tuple[NGramScheme, list[int], By]
"""A scheme, the tokens of texts, and the ids at a position by plain Python."""


def small_deepseek() -> Case:
    # No prime twice, and each order begins again: 41 and 43 of order 3 are taken before those above 50.
    taken: set[int] = set()
    primes: list[int] = []
    for _ in SMALL_DEEPSEEK["layers"]:
        primes = []
        for first in SMALL_DEEPSEEK["first_moduli"]:
            fresh = [prime for prime in reference.primes(first, 30) if prime not in taken][:3]
            taken |= set(fresh)
            primes += fresh
    half = (2**63 - 1) // 12 // 2
    multipliers = (np.random.default_rng(10_007 * 5).integers(0, half, size=4, dtype=np.int64) * 2 + 1).tolist()
    functions = reference.XorHash(multipliers, primes, 3)
    return (
        DeepSeekNGrams(**SMALL_DEEPSEEK),
        [DEAD, *range(12)],
        lambda text, at: reference.deepseek(text, at, 4, 2, functions),
    )


def mapped_deepseek() -> Case:
    _, _, by = small_deepseek()
    scheme = DeepSeekNGrams(**SMALL_DEEPSEEK, token_map=TOKEN_MAP, vocabulary=16, pad_token=6)

    def compressed(text: list[int], at: int) -> list[int]:
        return by([token if token == DEAD else int(TOKEN_MAP[token]) for token in text], at)

    return scheme, [DEAD, *range(16)], compressed


def deepseek() -> Case:
    half = (2**63 - 1) // 99_092 // 2
    drawn = np.random.default_rng(10_007 * 14).integers(0, half, size=4, dtype=np.int64) * 2 + 1
    functions = reference.XorHash(drawn.tolist(), reference.primes(16_000_000, 48)[24:], 8)
    return (
        DeepSeekNGrams.deepseek_v4_1_flash(14),
        [DEAD, 0, 1, 2, 3, 99_090, 99_091],
        lambda text, at: reference.deepseek(text, at, 4, 2, functions),
    )


def qwen_of(numbers: dict[str, Any], tokens: list[int], layer_index: int) -> Case:
    eos, n, heads = numbers["eos"], numbers["n"], numbers["heads"]
    half = (2**63 - 1) // numbers["vocabulary"] // 2
    states = [numbers["seed"] + 10_007 * layer_index + 0x9E3779B97F4A7C15 * (place + 1) for place in range(n)]
    multipliers = [2 * (reference.splitmix64(state) % half) + 1 for state in states]
    count = (n - 1) * heads
    primes = reference.primes(numbers["first_modulus"], (layer_index + 1) * count)[layer_index * count :]
    functions = reference.XorHash(multipliers, primes, heads)
    scheme = QwenNGrams(**numbers, layer_index=layer_index)
    return scheme, tokens, lambda text, at: reference.qwen(text, at, n, eos, functions)


def qwen() -> Case:
    numbers = {"vocabulary": 248_320, "eos": EOS, "n": 3, "heads": 8, "first_modulus": 20_000_000, "seed": 1234}
    return qwen_of(numbers, [0, 1, EOS, EOS, 248_056, 248_319], 0)


def longcat() -> Case:
    return (
        LongCatNGrams.longcat_flash_lite(),
        [0, 1, 2, 2, 3, 131_070, 131_071],
        lambda text, at: reference.longcat(text, at, 4, 4, 131_072, 78 * 131_072, 2),
    )


def small_longcat() -> Case:
    return (
        LongCatNGrams(**SMALL_LONGCAT),
        list(range(20)),
        lambda text, at: reference.longcat(text, at, 5, 2, 20, 1000, 3),
    )


def widest_longcat() -> Case:
    base = 2**27 - 2 * 16 * 64
    return (
        LongCatNGrams(vocabulary=2**31, eos=3, n=16, heads=1, modulus_base=base),
        [0, 3, 2**31 - 1, 2**31 - 2],
        lambda text, at: reference.longcat(text, at, 16, 1, 2**31, base, 3),
    )


def salted(scheme: SaltedNGrams, tokens: list[int]) -> Case:
    slots = list(zip(scheme.orders, scheme.salts, strict=True))
    rows = scheme.num_rows
    return scheme, tokens, lambda text, at: [reference.salted(text, at, order, salt, rows) for order, salt in slots]


def xor(rows: int, tokens: list[int]) -> Case:
    return XorNGrams(rows=rows), tokens, lambda text, at: reference.bigram_and_trigram(text, at, rows)


def mapped_xor() -> Case:
    scheme = XorNGrams(rows=100, token_map=TOKEN_MAP)
    by = TOKEN_MAP.tolist()
    return scheme, list(range(16)), lambda text, at: reference.bigram_and_trigram([by[t] for t in text], at, 100)


CASES: dict[str, Callable[[], Case]] = {
    "deepseek": deepseek,
    "deepseek, small": small_deepseek,
    "deepseek, mapped": mapped_deepseek,
    "qwen": qwen,
    "qwen, small": lambda: qwen_of(SMALL_QWEN, list(range(20)), 2),
    "longcat": longcat,
    "longcat, small": small_longcat,
    "longcat, widest": widest_longcat,
    "nanogpt 366": lambda: salted(SaltedNGrams.nanogpt_366(), [0, 1, 50_256, 430_000, 2**40, 2**63 - 2]),
    "salted, small": lambda: salted(SaltedNGrams(**SMALL_SALTED), [0, 1, 2, 3, 2**63 - 2]),
    "nanogpt 360": lambda: xor(84_602_880, [0, 1, 50_256, 60_000, 2**31 - 1]),
    "xor, small": lambda: xor(4, list(range(9))),
    "xor, mapped": mapped_xor,
}
each_case = pytest.mark.parametrize("case", CASES)


def texts(tokens: list[int], count: int, length: int) -> Tensor:
    return torch.tensor([random.choices(tokens, k=length) for _ in range(count)], dtype=torch.int64)


@each_case
def test_any_text_has_the_ids_of_plain_python(case: str) -> None:
    scheme, tokens, by = CASES[case]()
    given = texts(tokens, 40, 12)
    found = scheme.ids(given)
    assert found.dtype == torch.int64
    assert found.tolist() == [[by(text, at) for at in range(12)] for text in given.tolist()]
    assert found.min() >= 0
    assert found.max() < scheme.num_rows
    assert torch.equal(scheme.ids(given.reshape(5, 8, 12)), found.reshape(5, 8, 12, scheme.slots))
    assert torch.equal(scheme.ids(given[3]), found[3]), "texts do not touch"


def cuts(length: int) -> Iterator[list[int]]:
    yield [1] * length
    yield [0, length, 0]
    for _ in range(8):
        sizes: list[int] = []
        while sum(sizes) < length:
            sizes.append(min(random.choice([0, 1, 2, 3, 5]), length - sum(sizes)))
        yield sizes


@each_case
def test_a_text_in_pieces_has_the_ids_of_the_whole(case: str) -> None:
    scheme, tokens, _ = CASES[case]()
    given = texts(tokens, 30, 14)
    whole = scheme.ids(given)
    for sizes in cuts(14):
        pieces, history = [], None
        for piece in given.split(sizes, dim=-1):
            pieces.append(scheme.ids(piece, history))
            history = scheme.history_after(piece, history)
            assert history.shape == (30, scheme.history)
        assert torch.equal(torch.cat(pieces, dim=-2), whole), sizes
    for begin in range(1, 14):
        # Histories that are shorter than those of the scheme begin with the text, and longer ones are cut.
        assert torch.equal(scheme.ids(given[:, begin:], given[:, :begin]), whole[:, begin:])


@each_case
def test_types_and_sizes_of_tokens(case: str) -> None:
    scheme, tokens, _ = CASES[case]()
    given = texts([token for token in tokens if token < 2**31], 6, 9)
    assert torch.equal(scheme.ids(given.int()), scheme.ids(given))
    assert torch.equal(scheme.ids(given[:, 4:].int(), given[:, :4].int()), scheme.ids(given)[:, 4:])
    assert scheme.ids(given[:, :0]).shape == (6, 0, scheme.slots)
    assert scheme.ids(given[:0]).shape == (0, 9, scheme.slots)
    assert scheme.ids(given.to("meta")).shape == (6, 9, scheme.slots)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert scheme.ids(torch.zeros(6, 9, dtype=torch.int64)).shape == (6, 9, scheme.slots)
    assert torch.equal(scheme.ids(given.T.contiguous().T), scheme.ids(given)), "tokens that do not lie in order"


@each_case
def test_equal_schemes_and_copies_are_one(case: str) -> None:
    scheme, tokens, _ = CASES[case]()
    given = texts(tokens, 2, 9)
    for again in (CASES[case]()[0], copy.deepcopy(scheme), pickle.loads(pickle.dumps(scheme))):
        assert again == scheme
        assert hash(again) == hash(scheme)
        assert again.meaning() == scheme.meaning()
        assert torch.equal(again.ids(given), scheme.ids(given))
    others = [CASES[other]()[0] for other in CASES if other != case]
    assert scheme not in others
    assert scheme != "a scheme"
    assert repr(scheme) == f"<{type(scheme).__name__}: {scheme.num_rows} rows, {scheme.slots} for each token>"


def test_a_map_is_copied() -> None:
    given = TOKEN_MAP.clone()
    scheme = XorNGrams(rows=100, token_map=given)
    given.zero_()
    assert scheme == XorNGrams(rows=100, token_map=TOKEN_MAP) != XorNGrams(rows=100, token_map=given)
    assert scheme.meaning()["token_map"] == "crc32 b66a2538"


@pytest.mark.parametrize("seed", [0, 1, 10_007, 140_098, 2**32 - 1, 2**32, 2**40 + 5, 2**63, 2**64 - 1])
def test_pcg64_draws_what_numpy_draws(seed: int) -> None:
    for bound in (2**32 + 1, 46_539_281_472_733, 3 * 2**61, 2**62 + 1, 2**63 - 1):
        expected = np.random.default_rng(seed).integers(0, bound, size=40, dtype=np.int64)
        assert pcg64_integers(seed, bound, 40) == expected.tolist()


@pytest.mark.parametrize(("seed", "bound", "words"), [(-1, 2**40, "seed"), (2**64, 2**40, "seed"), (0, 2**32, "range")])
def test_pcg64_refuses_what_numpy_draws_otherwise(seed: int, bound: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pcg64_integers(seed, bound, 1)


def test_splitmix64_gives_its_published_outputs() -> None:
    # Of seed 1234567, by the generator's authors.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567 + place * 0x9E3779B97F4A7C15) for place in range(3)] == expected


def test_primes_are_those_of_trial_division() -> None:
    assert [number for number in range(-3, 3000) if is_prime(number)] == reference.primes(2, 430)[:430]
    assert is_prime(2**61 - 1)
    assert not is_prime(2**61 + 1)
    # Strong pseudoprimes to the first 9 and 11 prime bases.
    assert not is_prime(3825123056546413051)
    assert not is_prime(341550071728321)
    assert next_prime(16_000_000) == 16_000_057
    assert next_prime(2) == 3
    assert largest_prime_up_to(80_000_000) == 79_999_987
    assert largest_prime_up_to(2) == 2
    found = primes_from(2, leaving_out={3, 7})
    assert [next(found) for _ in range(4)] == [2, 5, 11, 13]


def test_products_of_tokens_and_multipliers_fit_into_int64() -> None:
    for vocabulary in (1, 2, 99_092, 248_320, 2**31):
        assert (vocabulary - 1) * (2 * (odd_multiplier_range(vocabulary) - 1) + 1) < 2**63


class Ids(torch.nn.Module):
    """A module that gives ids alone."""

    def __init__(self, scheme: NGramScheme) -> None:
        super().__init__()
        self.scheme = scheme

    def forward(self, tokens: Tensor, history: Tensor | None = None) -> Tensor:
        return self.scheme.ids(tokens, history)


@pytest.mark.usefixtures("fresh_compiler")  # It keeps few forms of the code that all schemes share.
@pytest.mark.parametrize("case", ["deepseek, mapped", "nanogpt 360"])
def test_ids_are_compiled_whole(case: str) -> None:
    scheme, tokens, _ = CASES[case]()
    compiled = torch.compile(Ids(scheme), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (6, 9):
        given = texts(tokens, 3, length)
        assert torch.equal(compiled(given), scheme.ids(given))
        assert torch.equal(compiled(given[:, 4:], given[:, :4]), scheme.ids(given)[:, 4:])
    with pytest.raises(RuntimeError, match=f"{type(scheme).__name__}: tokens must be from {scheme._least_token} to"):  # type: ignore[attr-defined]
        compiled(texts([-2, -3], 3, 6))


@pytest.mark.tier("test")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", ["deepseek", "qwen", "longcat", "salted, small", "xor, mapped"])
def test_ids_of_every_scheme_are_compiled_whole(case: str) -> None:
    scheme, tokens, _ = CASES[case]()
    compiled, given = torch.compile(Ids(scheme), fullgraph=True, backend="aot_eager"), texts(tokens, 3, 6)
    assert torch.equal(compiled(given), scheme.ids(given))


@pytest.mark.parametrize("case", ["deepseek, mapped", "qwen"])
def test_ids_are_exported(case: str) -> None:
    scheme, tokens, _ = CASES[case]()
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    program = torch.export.export(Ids(scheme), (texts(tokens, 3, 6),), dynamic_shapes=(sizes,), strict=False)
    for shape in ((3, 6), (2, 11)):
        given = texts(tokens, *shape)
        assert torch.equal(program.module()(given), scheme.ids(given))
    with pytest.raises(RuntimeError, match=f"{type(scheme).__name__}: tokens must be from"):
        program.module()(texts([-2, -3], 3, 6))
