"""Only what a rank of this job has signed is unpickled."""

import pickle

import pytest

from keras_dist.launch.signing import VARIABLE, sign, verify


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize("change", ["unsigned", "changed", "of another job"])
def test_a_message_without_a_valid_signature_is_not_unpickled(monkeypatch, change):
    """The signature is verified before the message is unpickled."""
    monkeypatch.setenv(VARIABLE, "of another job")
    foreign = sign(Bomb())
    monkeypatch.setenv(VARIABLE, "ours")
    assert verify(sign([1])) == [1]
    message = {
        "unsigned": pickle.dumps(Bomb()),
        "changed": sign([1])[:32] + pickle.dumps(Bomb()),
        "of another job": foreign,
    }[change]
    with pytest.raises(RuntimeError, match="signature of this job"):
        verify(message)
