"""The data of the two tasks: more prompts than fit in one small request."""

from datasets import Dataset, DatasetDict

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "England": "London",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
}


def dataset(**_: object) -> DatasetDict:
    cities = list(CAPITALS.values())
    rows = [
        {"country": country, "cities": [city, cities[index - 1], cities[index - 2]]}
        for index, (country, city) in enumerate(CAPITALS.items())
    ]
    return DatasetDict({"test": Dataset.from_list(rows)})


def numbers(**_: object) -> DatasetDict:
    rows = [{"start": f"{n}, {n + 1}, {n + 2},", "next": f"{n + 3}, {n + 4}"} for n in range(1, 25)]
    return DatasetDict({"test": Dataset.from_list(rows)})
