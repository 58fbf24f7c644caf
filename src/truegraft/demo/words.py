"""Word lists of the demo tasks: names, cities, months and weekdays."""

from __future__ import annotations


def _split(text: str, separator: str | None = None) -> tuple[str, ...]:
    """The items of a list that is written as text; line ends count as spaces."""
    return tuple(" ".join(item.split()) for item in text.split(separator))


MONTHS = _split(
    "January February March April May June July August September October November December"
)
WEEKDAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

GIVEN_NAMES = _split(
    """
    Ada Alan Alice Amara Amy Anna Anton Aisha Ben Boris Carl Carmen Chen Clara Daniel David Diana
    Edgar Edith Elena Ella Emil Emma Erik Eva Fatima Felix Flora Frank Fred George Grace Hana Harry
    Helen Henry Hugo Ida Igor Irene Isaac Ivan Jack James Jane Joan John Jonas Jose Julia Karen
    Karl Kate Kenji Laura Lena Leo Lily Linus Lisa Louis Lucy Maria Mark Martha Martin Mary Max
    Maya Michael Mia Nadia Nina Noah Nora Oliver Olga Omar Oscar Otto Paul Peter Philip Priya
    Rachel Ravi Robert Rosa Ruth Samuel Sara Simon Sofia Stefan Susan Thomas Tina Tom Vera Victor
    Walter Yuki Zoe
    """
)
FAMILY_NAMES = _split(
    """
    Adams Allen Baker Barnes Becker Bell Berg Brown Bruno Butler Carter Chavez Clark Cole Cooper
    Cox Cruz Curie Davis Dean Diaz Dixon Duncan Edwards Ellis Evans Fischer Fisher Flores Ford
    Foster Fox Garcia Gibson Gomez Gray Green Gupta Hall Hansen Harris Hayes Hill Holm Hopper
    Howard Hughes Hunt Ito Jackson Jensen Johnson Jones Kaya Kelly Kim King Klein Kumar Lane Larsen
    Lee Lewis Lopez Lovelace Marsh Martinez Mason Meyer Miller Moore Morgan Morris Murphy Nelson
    Newton Nguyen Noether Novak Olsen Palmer Park Parker Patel Perez Porter Price Reed Reyes Rivera
    Roberts Rogers Rossi Russell Sato Schmidt Scott Shaw Silva Singh Smith Stone Sutton Tanaka
    Taylor Torres Turing Turner Vogel Wagner Walker Ward Watson Weber West White Wilson Wolf Wood
    Wright Young Zimmer
    """
)
CITIES = _split(
    """
    London, Paris, Berlin, Madrid, Rome, Vienna, Oslo, Lisbon, Dublin, Prague, Athens, Warsaw,
    Cairo, Tokyo, Sydney, Toronto, Amsterdam, Ankara, Auckland, Baghdad, Bangkok, Barcelona,
    Beijing, Bogota, Boston, Brussels, Budapest, Buenos Aires, Cape Town, Chicago, Copenhagen,
    Dakar, Delhi, Dresden, Edinburgh, Florence, Geneva, Glasgow, Hamburg, Hanoi, Havana, Helsinki,
    Istanbul, Jakarta, Jerusalem, Kyoto, Lagos, Lima, Lyon, Manila, Marseille, Melbourne, Mexico
    City, Milan, Montreal, Moscow, Mumbai, Munich, Nairobi, Naples, New York, Osaka, Oxford, Perth,
    Quito, Riga, San Francisco, Santiago, Seoul, Shanghai, Singapore, Sofia, Stockholm, Tallinn,
    Tunis, Turin, Venice, Vilnius, Zagreb, Zurich
    """,
    ",",
)
