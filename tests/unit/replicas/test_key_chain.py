"""Keys that grow with a sequence are those of the whole."""

import pytest

from bifolio.kv_manager.keys import chain, root
from bifolio.protos.messages import Geometry
from bifolio.replicas.key_chain import KeyChain

GEOMETRY = Geometry("model", 2, 2, 8, 4, "float32")
TOKENS = [i * 37 % 101 for i in range(27)]
WHOLE = chain(root(GEOMETRY, "mine"), TOKENS, 4)


@pytest.mark.parametrize("begun", [0, 1, 3, 4, 5, 8, 27])
def test_a_chain_that_grew_has_the_keys_of_the_whole(begun: int) -> None:
    it = KeyChain(GEOMETRY, "mine", TOKENS[:begun])
    for token in TOKENS[begun:]:
        it.append(token)
    assert [tuple(it.upto(n)) for n in range(28)] == [WHOLE[: n // 4] for n in range(28)]


@pytest.mark.parametrize("begun", [7, 8])
def test_forks_go_on_by_themselves(begun: int) -> None:
    it = KeyChain(GEOMETRY, "mine", TOKENS[:begun])
    other = it.fork()
    for token in TOKENS[begun:]:
        it.append(token)
    assert tuple(other.upto(27)) == WHOLE[: begun // 4]
    for _ in range(5):
        other.append(0)
    assert tuple(it.upto(27)) == WHOLE
    assert tuple(other.upto(27)) == chain(root(GEOMETRY, "mine"), [*TOKENS[:begun], *[0] * 5], 4)


def test_another_salt_has_other_keys() -> None:
    assert KeyChain(GEOMETRY, "", TOKENS).upto(4)[0] != WHOLE[0]
