"""Records and words: what goes in comes out, and a record that is not whole is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.action import Action
from rrfp.comm.message import Malformed
from rrfp.tp_coord.record import RECORD_BYTES, Decision, Receipt, decode, encode, fold, fold_message

ACTIONS = st.builds(Action, st.from_regex(r"[A-Z][A-Z_]{0,31}", fullmatch=True), st.integers(0, 2**32 - 1),
                    st.one_of(st.none(), st.integers(0, 2**31 - 1)))


@given(st.builds(Decision, st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1), ACTIONS, st.integers(0, 2**32 - 1)))
def test_a_decision_survives(decision):
    record = encode(decision)
    assert len(record) == RECORD_BYTES and decode(record) == decision


def test_any_changed_bit_is_seen(seed):
    record = bytearray(encode(Decision(7, 3, Action("F", 1, 5), 99)))
    for bit in range(8 * RECORD_BYTES):
        record[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Malformed, match="corrupted"):
            decode(bytes(record))
        record[bit // 8] ^= 1 << bit % 8
    for size in (0, 1, RECORD_BYTES - 1, RECORD_BYTES + 1):
        with pytest.raises(Malformed, match="corrupted"):
            decode(random.Random(seed).randbytes(size))


def test_a_kind_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="33 letters: 32 at most"):
        encode(Decision(1, 0, Action("A" * 33, 0), 0))


def test_the_digest_tells_sequences_apart():
    one, two = Action("F", 1, 0), Action("F", 1, 1)
    assert fold(fold(0, 0, one), 0, two) != fold(fold(0, 0, two), 0, one)
    assert len({fold(0, 0, one), fold(0, 1, one), fold(0, 0, one._replace(stage=2)), fold(0, 0, one._replace(kind="B")),
                fold(0, 0, one._replace(microbatch=None))}) == 5
    assert fold_message(0, 0, 1) != fold_message(0, 1, 1) != fold_message(0, 1, None)


@given(st.integers(0, 2**40), st.integers(-30_000, 30_000), st.integers(0, 2**24 - 1), st.integers(0, 2**32 - 1))
def test_a_word_knows_its_call_near_another(near, apart, count, digest):
    call = max(0, near + apart)
    word = Receipt(call, count, digest).word
    assert 0 <= word < 2**64
    assert Receipt.of(word, near=near) == (call, count, digest & 0xFFFFFF)
