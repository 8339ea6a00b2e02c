"""Only what a rank of this job has signed is unpickled."""

import pickle

import pytest

from keras_dist.launch.signing import VARIABLE, sign, verify


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("unpickled",)


def test_a_message_without_a_valid_signature_is_not_unpickled(monkeypatch):
    """One that is not signed, that was changed, or that another job has signed."""
    monkeypatch.setenv(VARIABLE, "of another job")
    foreign = sign(Bomb())
    monkeypatch.setenv(VARIABLE, "ours")
    signed, bomb = sign([1]), pickle.dumps(Bomb())
    assert verify(signed) == [1]
    for message in (bomb, signed[:32] + bomb, foreign):
        with pytest.raises(RuntimeError, match="signature of this job"):
            verify(message)
