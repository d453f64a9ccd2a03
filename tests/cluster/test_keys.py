import pytest

from pipedream_rt.cluster.keys import NONCE, Handshake, JobKey, Secret, group_key

HELLO = {"name": "w", "pid": 1, "host": "here", "boot": "b", "version": 3}
TALK = Handshake(b"key", b"asked", b"answer", b"channel")


def test_a_proof_depends_on_the_key_both_nonces_the_channel_and_every_field_of_the_hello():
    proofs = {TALK.prove(HELLO)}
    for field in Handshake._fields:
        proofs.add(TALK._replace(**{field: b"other"}).prove(HELLO))
    for field in HELLO:
        proofs.add(TALK.prove({**HELLO, field: "other"}))
    assert len(proofs) == 1 + len(Handshake._fields) + len(HELLO)


def test_a_proof_leaves_out_the_proof_and_the_nonce_that_the_hello_carries():
    assert TALK.prove({**HELLO, "nonce": b"answer", "proof": b"p"}) == TALK.prove(HELLO)


def test_parts_that_run_into_each_other_make_different_keys():
    assert Handshake(b"k", b"ab", b"c").session_key() != Handshake(b"k", b"a", b"bc").session_key()


def test_the_keys_of_one_secret_differ_by_purpose_and_by_nonce():
    talk = Handshake(b"s", b"n", b"")
    keys = {talk.session_key(), talk.prove_admission(), talk.prove({})}
    keys |= {talk.prove_refusal({"reason": "", "passing": True})}
    keys |= {group_key(b"s", b"n"), group_key(b"s", b"m")}
    assert len(keys) == 6


def test_a_token_is_the_key_whatever_the_salt():
    secret = Secret.generated()
    assert secret != Secret.generated()
    assert secret.key(b"one") == secret.key(b"other") == bytes.fromhex(secret.text)
    assert secret.job_key().key == secret.key(b"")


@pytest.mark.parametrize("text", ["a text that somebody has thought of", "f" * 63, "f" * 65])
def test_the_key_of_another_text_depends_on_the_salt(text):
    """So nobody can try texts before he has heard it, and each costs him 128 MiB."""
    secret = Secret(text)
    keys = {secret.key(b"one"), secret.key(b"other"), Secret(text + "e").key(b"one")}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {NONCE}
    made = secret.job_key()
    assert made == secret.job_key()
    assert made.key == secret.key(made.salt)
    assert made.salt != JobKey.new().salt
