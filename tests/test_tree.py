"""Index arithmetic on one tree of five nodes, worked out by hand.

0 (token 7)
+- 1 (token 3)
|  +- 3 (token 3)
|     +- 4 (token 9)
+- 2 (token 5)
"""

from __future__ import annotations

import pytest

from eyas.tree import Tree

FIVE = Tree((7, 3, 5, 3, 9), (-1, 0, 0, 1, 3), (0.0, -0.5, -1.0, -0.5, -2.0))


def test_depths_children_paths_leaves() -> None:
    assert FIVE.depths == (0, 1, 1, 2, 3)
    assert FIVE.children(0) == [1, 2]
    assert FIVE.children(4) == []
    assert FIVE.path(4) == [0, 1, 3, 4]
    assert FIVE.path(0) == [0]
    assert FIVE.leaves() == [2, 4]
    assert FIVE.child(0, 5) == 2
    assert FIVE.child(0, 9) is None


def test_ancestor_mask() -> None:
    assert FIVE.ancestor_mask().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_chain_is_a_tree() -> None:
    chain = Tree.chain([4, 4, 4])  # equal tokens are fine, as long as they are not siblings
    assert chain.parents == (-1, 0, 1)
    assert chain.ancestor_mask().int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_best_keeps_parents_before_children_with_equal_scores() -> None:
    # nodes 1 and 3 tie at -0.5: the parent is taken first, so the choice is closed under parents
    assert FIVE.best(1) == Tree((7, 3), (-1, 0), (0.0, -0.5))
    assert FIVE.best(2) == Tree((7, 3, 3), (-1, 0, 1), (0.0, -0.5, -0.5))
    assert FIVE.best(3) == Tree((7, 3, 5, 3), (-1, 0, 0, 1), (0.0, -0.5, -1.0, -0.5))
    assert FIVE.best(99) == FIVE


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((), (), "one parent"),
        ((1, 2), (-1,), "one parent"),
        ((1, 2), (0, 0), "root's parent"),
        ((1, 2), (-1, 1), "before their children"),
        ((1, 2, 2), (-1, 0, 0), "siblings"),
    ],
)
def test_refuses_what_is_no_tree(tokens: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree(tokens, parents)
