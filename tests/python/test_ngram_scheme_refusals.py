"""What published schemes of hashed n-grams refuse: numbers, maps, tokens, histories."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_schemes import SCHEMES, TOKEN_MAP, deepseek_with, longcat_with, qwen_with, salted_with

from recstore_ops import DeepSeekNGrams, LongCatNGrams, QwenNGrams, SaltedNGrams, XorNGrams

pytestmark = pytest.mark.tier("quick")

DEAD = -1
MOST = 2**63 - 1
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "n of 1": (lambda: deepseek_with(n=1), ValueError, "DeepSeekNGrams: expected n from 2 to 16, got 1"),
    "n of 17": (lambda: qwen_with(n=17), ValueError, "QwenNGrams: expected n from 2 to 16, got 17"),
    "a float n": (lambda: longcat_with(n=2.0), TypeError, "LongCatNGrams: n must be an integer, got 2.0"),
    "no heads": (lambda: deepseek_with(heads=0), ValueError, "DeepSeekNGrams: expected heads from 1 to 64, got 0"),
    "many heads": (lambda: longcat_with(heads=65), ValueError, "LongCatNGrams: expected heads from 1 to 64, got 65"),
    "True heads": (lambda: qwen_with(heads=True), TypeError, "QwenNGrams: heads must be an integer, got True"),
    "no compressed vocabulary": (
        lambda: deepseek_with(compressed_vocabulary=0),
        ValueError,
        f"DeepSeekNGrams: expected compressed_vocabulary from 1 to {MOST}, got 0",
    ),
    "words of 32 bits": (
        lambda: deepseek_with(compressed_vocabulary=2**30),
        ValueError,
        "DeepSeekNGrams: expected a compressed_vocabulary below 2**30, as numpy draws multipliers from 32 bits for "
        "more, got 1073741824",
    ),
    "a pad beyond": (lambda: deepseek_with(pad=12), ValueError, "DeepSeekNGrams: expected pad from 0 to 11, got 12"),
    "a negative seed": (
        lambda: deepseek_with(seed=-1),
        ValueError,
        f"DeepSeekNGrams: expected seed from 0 to {MOST}, got -1",
    ),
    "a layer without a table": (
        lambda: deepseek_with(layer=3),
        ValueError,
        "DeepSeekNGrams: expected distinct layers with layer 3 among them, got [2, 5]",
    ),
    "a layer twice": (
        lambda: deepseek_with(layers=[5, 5]),
        ValueError,
        "DeepSeekNGrams: expected distinct layers with layer 5 among them, got [5, 5]",
    ),
    "layers that are a number": (
        lambda: deepseek_with(layers=5),
        TypeError,
        "DeepSeekNGrams: layers must be a sequence of integers, got 5",
    ),
    "a negative layer": (
        lambda: deepseek_with(layers=[5, -1]),
        ValueError,
        "DeepSeekNGrams: expected layers[1] from 0 to 4294967296, got -1",
    ),
    "moduli of other lengths": (
        lambda: deepseek_with(first_moduli=[9, 9]),
        ValueError,
        "DeepSeekNGrams: n 4 needs 3 first_moduli, got [9, 9]",
    ),
    "moduli beyond int64": (
        lambda: deepseek_with(first_moduli=[2**62] * 3, heads=1, layers=[5]),
        ValueError,
        "DeepSeekNGrams: expected at most 2**63 - 1 rows, got ",
    ),
    "other rows": (
        lambda: deepseek_with(expected_rows=5),
        ValueError,
        "DeepSeekNGrams: expected rows 5, but the numbers of the scheme give ",
    ),
    "other moduli": (
        lambda: qwen_with(expected_moduli=[31, 37, 41, 47]),
        ValueError,
        "QwenNGrams: expected moduli [31, 37, 41, 47], but the numbers of the scheme give [31, 37, 41, 43]",
    ),
    "other multipliers": (
        lambda: QwenNGrams.qwen3_8_flash_next(expected_multipliers=[1, 2, 3]),
        ValueError,
        "QwenNGrams: expected multipliers [1, 2, 3], but the numbers of the scheme give "
        "[23703573157769, 20109073645365, 8052911324071]",
    ),
    "other multipliers of DeepSeek": (
        lambda: deepseek_with(expected_multipliers=[1]),
        ValueError,
        "DeepSeekNGrams: expected multipliers [1], but ",
    ),
    "other moduli of DeepSeek": (
        lambda: deepseek_with(expected_moduli=[1]),
        ValueError,
        "DeepSeekNGrams: expected moduli [1], but ",
    ),
    "the rows of the other layer": (
        lambda: DeepSeekNGrams.deepseek_v4_1_flash(1, expected_rows=384_016_682),
        ValueError,
        "DeepSeekNGrams: expected rows 384016682, but the numbers of the scheme give 384006168",
    ),
    "other rows of Qwen": (
        lambda: QwenNGrams.qwen3_8_flash_next(expected_rows=320_001_446),
        ValueError,
        "QwenNGrams: expected rows 320001446, but the numbers of the scheme give 320001536",
    ),
    "other rows of LongCat": (
        lambda: LongCatNGrams.longcat_flash_lite(expected_rows=1),
        ValueError,
        "LongCatNGrams: expected rows 1, but the numbers of the scheme give 122683536",
    ),
    "other moduli of LongCat": (
        lambda: longcat_with(n=2, expected_moduli=[1001, 1002]),
        ValueError,
        "LongCatNGrams: expected moduli [1001, 1002], but the numbers of the scheme give [1001, 1003]",
    ),
    "other rows of nanogpt": (
        lambda: SaltedNGrams.nanogpt_366(expected_rows=80_000_000),
        ValueError,
        "SaltedNGrams: expected rows 80000000, but the numbers of the scheme give 79999987",
    ),
    "other rows of nanochat": (
        lambda: SaltedNGrams.nanochat(expected_rows=1),
        ValueError,
        "SaltedNGrams: expected rows 1, but the numbers of the scheme give 299999977",
    ),
    "another layer of V4.1": (
        lambda: DeepSeekNGrams.deepseek_v4_1_flash(2),
        ValueError,
        "DeepSeekNGrams: DeepSeek-V4.1-Flash has tables at layers [1, 14], got 2",
    ),
    "another layer of the demo": (
        lambda: DeepSeekNGrams.engram_demo(14, compressed_vocabulary=9),
        ValueError,
        "DeepSeekNGrams: the demo of Engram has tables at layers [1, 15], got 14",
    ),
    "the demo with nothing": (
        lambda: DeepSeekNGrams.engram_demo(1),
        TypeError,
        "DeepSeekNGrams: the demo of Engram takes either a token_map or a compressed_vocabulary",
    ),
    "the demo with both": (
        lambda: DeepSeekNGrams.engram_demo(1, TOKEN_MAP, 12),
        TypeError,
        "DeepSeekNGrams: the demo of Engram takes either a token_map or a compressed_vocabulary",
    ),
    "a map of int32": (
        lambda: deepseek_with(token_map=TOKEN_MAP.int()),
        TypeError,
        "DeepSeekNGrams: token_map must be a tensor of int64, got torch.int32",
    ),
    "a map that is a list": (
        lambda: XorNGrams(rows=10, token_map=[0, 1]),  # type: ignore[arg-type]
        TypeError,
        "XorNGrams: token_map must be a tensor of int64, got list",
    ),
    "a map of two dimensions": (
        lambda: deepseek_with(token_map=TOKEN_MAP.reshape(4, 4)),
        ValueError,
        "DeepSeekNGrams: token_map must be [vocabulary], got [4, 4]",
    ),
    "an empty map": (
        lambda: XorNGrams(rows=10, token_map=TOKEN_MAP[:0]),
        ValueError,
        "XorNGrams: token_map must be [vocabulary], got [0]",
    ),
    "a map with a negative id": (
        lambda: deepseek_with(token_map=torch.tensor([0, 11, -3, 2])),
        ValueError,
        "DeepSeekNGrams: token_map has the id -3 for token 2, expected 0 or more",
    ),
    "a map of another vocabulary": (
        lambda: deepseek_with(token_map=TOKEN_MAP, vocabulary=17),
        ValueError,
        "DeepSeekNGrams: expected tokens in token_map 17, but the numbers of the scheme give 16",
    ),
    "a map with other ids": (
        lambda: deepseek_with(token_map=TOKEN_MAP[:-1]),
        ValueError,
        "DeepSeekNGrams: expected a token_map with ids up to 11, of compressed_vocabulary 12, got ids up to 10",
    ),
    "a map of another pad": (
        lambda: deepseek_with(token_map=TOKEN_MAP, pad_token=3),
        ValueError,
        "DeepSeekNGrams: expected id of pad_token 3 2, but ",
    ),
    "a pad token beyond": (
        lambda: deepseek_with(token_map=TOKEN_MAP, pad_token=16),
        ValueError,
        "DeepSeekNGrams: expected pad_token from 0 to 15, got 16",
    ),
    "a map of another model": (
        lambda: DeepSeekNGrams.deepseek_v4_1_flash(1, TOKEN_MAP),
        ValueError,
        "DeepSeekNGrams: expected tokens in token_map 129280, but the numbers of the scheme give 16",
    ),
    "a map beyond int32": (
        lambda: XorNGrams(rows=10, token_map=torch.tensor([2**31])),
        ValueError,
        "XorNGrams: expected the largest id of token_map from 0 to 2147483647, got 2147483648",
    ),
    "no vocabulary": (
        lambda: qwen_with(vocabulary=0),
        ValueError,
        f"QwenNGrams: expected vocabulary from 1 to {2**62}, got 0",
    ),
    "EOS beyond": (lambda: qwen_with(eos=20), ValueError, "QwenNGrams: expected eos from 0 to 19, got 20"),
    "negative EOS": (lambda: longcat_with(eos=-1), ValueError, "LongCatNGrams: expected eos from 0 to 19, got -1"),
    "a list of EOS": (lambda: qwen_with(eos=[1]), TypeError, "QwenNGrams: eos must be an integer, got [1]"),
    "a layer index beyond": (
        lambda: qwen_with(layer_index=256),
        ValueError,
        "QwenNGrams: expected layer_index from 0 to 255, got 256",
    ),
    "a modulus of 1": (
        lambda: qwen_with(first_modulus=1),
        ValueError,
        f"QwenNGrams: expected first_modulus from 2 to {2**62}, got 1",
    ),
    "no padding": (lambda: qwen_with(padding=0), ValueError, f"QwenNGrams: expected padding from 1 to {2**31}, got 0"),
    "a large vocabulary of LongCat": (
        lambda: longcat_with(vocabulary=2**31 + 1),
        ValueError,
        f"LongCatNGrams: expected vocabulary from 1 to {2**31}, got {2**31 + 1}",
    ),
    "a large base": (
        lambda: longcat_with(modulus_base=2**27),
        ValueError,
        f"LongCatNGrams: expected modulus_base from 1 to {2**27 - 2048}, got {2**27}",
    ),
    "no rows": (lambda: salted_with(rows=0), ValueError, f"SaltedNGrams: expected rows from 1 to {MOST}, got 0"),
    "an order of 5": (
        lambda: salted_with(orders=[2, 5]),
        ValueError,
        "SaltedNGrams: expected orders[1] from 1 to 4, got 5",
    ),
    "a negative salt": (
        lambda: salted_with(salts=[-1]),
        ValueError,
        f"SaltedNGrams: expected salts[0] from 0 to {2**31}, got -1",
    ),
    "fewer salts": (
        lambda: salted_with(orders=[2, 3], salts=[1]),
        ValueError,
        "SaltedNGrams: expected one salt for each order, got orders [2, 3] and salts [1]",
    ),
    "no slots": (
        lambda: salted_with(orders=[], salts=[]),
        ValueError,
        "SaltedNGrams: expected the number of slots from 1 to 1024, got 0",
    ),
    "a small nanochat": (
        lambda: SaltedNGrams.nanochat(1),
        ValueError,
        f"SaltedNGrams: expected size from 2 to {2**62}, got 1",
    ),
    "odd rows": (lambda: XorNGrams(rows=5), ValueError, "XorNGrams: expected an even number of rows, got 5"),
    "two rows": (lambda: XorNGrams(rows=2), ValueError, f"XorNGrams: expected rows from 4 to {2**31 - 2}, got 2"),
}


@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_numbers_that_make_no_scheme_are_refused(
    make: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        make()


def test_numbers_of_a_file_that_agree_are_taken() -> None:
    known = QwenNGrams.qwen3_8_flash_next()
    given = {"expected_rows": 320_001_536, "expected_moduli": list(known.moduli)}
    assert QwenNGrams.qwen3_8_flash_next(**given, expected_multipliers=list(known.multipliers)) == known
    small = deepseek_with()
    expected = {"expected_moduli": small.moduli, "expected_multipliers": small.multipliers}
    assert deepseek_with(expected_rows=small.num_rows, **expected) == small
    assert DeepSeekNGrams.deepseek_v4_1_flash(14, expected_rows=384_016_682).num_rows == 384_016_682
    assert SaltedNGrams.nanochat(expected_rows=299_999_977) != SaltedNGrams.nanogpt_366(expected_rows=79_999_987)


def test_the_demo_takes_size_and_pad_of_its_map() -> None:
    demo = DeepSeekNGrams.engram_demo(1, TOKEN_MAP[[7, 5, 8, 15, 1, 0]])
    assert (demo.compressed_vocabulary, demo.pad) == (12, 6)
    assert demo.meaning()["token_map"] != "none"


def test_a_map_of_v4_1_gives_the_ids_of_compressed_tokens() -> None:
    token_map = torch.arange(129_280) % 99_092
    scheme = DeepSeekNGrams.deepseek_v4_1_flash(14, token_map)
    tokens = torch.tensor([[5, 99_097, 129_279, DEAD, 99_092]])
    compressed = torch.tensor([[5, 5, 30_187, DEAD, 0]])
    plain = DeepSeekNGrams.deepseek_v4_1_flash(14)
    assert torch.equal(scheme.ids(tokens), plain.ids(compressed))
    assert scheme != plain


each_scheme = pytest.mark.parametrize("kind", SCHEMES)


@each_scheme
def test_a_token_beyond_the_vocabulary_is_named_with_its_position(kind: str) -> None:
    make, least, most = SCHEMES[kind]
    scheme = make()
    for token in (least - 1, most + 1, -(2**63)):
        tokens = torch.zeros(2, 3, 4, dtype=torch.int64)
        tokens[1, 2, 3] = token
        words = f"^{kind}: expected tokens from {least} to {most}, got {token} at position \\[1, 2, 3\\]$"
        with pytest.raises(ValueError, match=words):
            scheme.ids(tokens)
        tokens, history = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, scheme.history, dtype=torch.int64)
        history[1, 0] = token
        if token == scheme.start:
            scheme.ids(tokens, history)
            continue
        words = f"^{kind}: expected the last {scheme.history} tokens of history from {least} to {most}, got {token} at "
        with pytest.raises(ValueError, match=words + r"position \[1, 0\]$"):
            scheme.ids(tokens, history)


ZEROS = torch.zeros(2, 3, dtype=torch.int64)
NO_TOKENS: dict[str, tuple[Any, type[Exception], str]] = {
    "floats": (
        ZEROS.float(),
        TypeError,
        "tokens must be dense and of int64 or int32, got torch.float32, torch.strided",
    ),
    "truth values": (ZEROS.bool(), TypeError, "tokens must be dense and of int64 or int32, got torch.bool, "),
    "bytes": (ZEROS.to(torch.uint8), TypeError, "tokens must be dense and of int64 or int32, got torch.uint8, "),
    "uint64": (ZEROS.to(torch.uint64), TypeError, "tokens must be dense and of int64 or int32, got torch.uint64, "),
    "sparse": (ZEROS.to_sparse(), TypeError, "tokens must be dense and of int64 or int32, got torch.int64, "),
    "a list": ([1, 2], TypeError, "tokens must be a tensor, got list"),
    "None": (None, TypeError, "tokens must be a tensor, got NoneType"),
    "a number": (torch.tensor(5), ValueError, "tokens must have a dimension of positions, got a tensor without dim"),
}


@each_scheme
@pytest.mark.parametrize(("tokens", "error", "words"), NO_TOKENS.values(), ids=NO_TOKENS)
def test_what_is_no_text_is_refused(kind: str, tokens: Any, error: type[Exception], words: str) -> None:
    scheme = SCHEMES[kind][0]()
    with pytest.raises(error, match=f"^{kind}: {re.escape(words)}"):
        scheme.ids(tokens)


NO_HISTORY: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": ([1], TypeError, "a history must be a tensor, got list"),
    "another type": (ZEROS.int(), TypeError, "expected a history of torch.int64, as the tokens, got torch.int32"),
    "other texts": (ZEROS[:1], ValueError, "tokens of shape [2, 3] need a history of [2, H], got [1, 3]"),
    "one text": (ZEROS[0], ValueError, "tokens of shape [2, 3] need a history of [2, H], got [3]"),
    "more dimensions": (ZEROS[None], ValueError, "tokens of shape [2, 3] need a history of [2, H], got [1, 2, 3]"),
}


@each_scheme
@pytest.mark.parametrize(("history", "error", "words"), NO_HISTORY.values(), ids=NO_HISTORY)
def test_what_is_no_history_is_refused(kind: str, history: Any, error: type[Exception], words: str) -> None:
    scheme = SCHEMES[kind][0]()
    for call in (scheme.ids, scheme.history_after):
        with pytest.raises(error, match=f"^{kind}: {re.escape(words)}$"):
            call(ZEROS, history)
