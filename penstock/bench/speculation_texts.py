"""Texts for `bench speculation` in which what comes next has mostly been said before."""

from __future__ import annotations

_MODULE = '''class Inventory:
    """Keeps track of how many of each item are in stock."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.items = {}

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        if self.total() + count > self.capacity:
            raise OverflowError("the inventory is full")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        if self.items.get(name, 0) < count:
            raise KeyError("not enough items in stock")
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())

    def report(self):
        for name, count in sorted(self.items.items()):
            print(f"{name}: {count}")
'''

CODE_EDIT = f"""Here is a file of our project:

```python
{_MODULE}```

The same file with the method `total` renamed to `count_all`, everything else unchanged:

```python
class Inventory:
    \"\"\"Keeps track of how many of each item are in stock.\"\"\"

    def __init__(self, capacity):
        self.capacity = capacity
"""

_PASSAGE = """The lighthouse on the northern cape was built in the spring of 1874 by a crew of forty masons who had come
from the granite quarries of the valley. Its tower is thirty-one metres high, and its first lamp burned rapeseed oil
behind a lens of six hundred and eight prisms. On clear nights the light could be seen from a distance of twenty-two
nautical miles. Until the year 1931 three keepers and their families lived in the low houses beside the tower; they kept
goats, grew cabbages behind a wall of stacked stones, and recorded the weather four times a day in a leather-bound book.
When the lamp was electrified, two of the three families left. The last keeper, who had been born in the house, stayed
until the light was automated in the autumn of 1968, and his records of the weather are still used by historians of the
climate today."""

QUOTE = f"""Document 1: The lighthouse on the northern cape

{_PASSAGE}

Question: What does the document say about the lighthouse? Quote the document word for word.

Answer: The document says: "The lighthouse on the northern cape was built in the spring of 1874 by"""
