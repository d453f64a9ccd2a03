from pipedream_rt.cluster.keys import group_key, prove, session_key

HELLO = {"name": "w", "pid": 1, "host": "here", "boot": "b", "version": 3}


def test_a_proof_depends_on_the_secret_both_nonces_and_every_field_of_the_hello():
    proofs = {prove(b"secret", b"asked", b"answer", HELLO)}
    proofs.add(prove(b"other", b"asked", b"answer", HELLO))
    proofs.add(prove(b"secret", b"other", b"answer", HELLO))
    proofs.add(prove(b"secret", b"asked", b"other", HELLO))
    for field in HELLO:
        proofs.add(prove(b"secret", b"asked", b"answer", {**HELLO, field: "other"}))
    assert len(proofs) == 4 + len(HELLO)


def test_a_proof_leaves_out_the_proof_and_the_nonce_that_the_hello_carries():
    with_both = {**HELLO, "nonce": b"answer", "proof": b"p"}
    assert prove(b"s", b"asked", b"answer", with_both) == prove(b"s", b"asked", b"answer", HELLO)


def test_parts_that_run_into_each_other_make_different_keys():
    assert session_key(b"secret", b"ab", b"c") != session_key(b"secret", b"a", b"bc")


def test_the_keys_of_one_secret_differ_by_purpose_and_by_nonce():
    keys = {session_key(b"s", b"n", b""), group_key(b"s", b"n"), group_key(b"s", b"m")}
    assert len(keys) == 3
