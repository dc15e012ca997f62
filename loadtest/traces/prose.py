"""Text drawn by a key, for what a file or a workload only gives the length of: equal keys read equal, everywhere."""

import hashlib
from collections.abc import Hashable
from random import Random

_DIGEST_BYTES = 16
_VOCABULARY = """
account address after agent amount answer article balance because before below block bridge cable call capacity
carry case change channel check city class clear client close cloud code column common complete concern
condition contract copy corner cost count course cover current customer daily data date deliver depth design
detail device document double driver early edge effect engine entry error event every exact example expect extra
failure field figure file final first follow form forward frame function garden general given global ground
group growth handle harbour header height history holder hour image index input inside issue item journey keep
kernel known label large later layer learn length letter level light limit line link list load local machine
manage many market match matter measure meeting memory message method middle minute model moment month morning
motion name nature network never night node north note number object offer often open order other output owner
packet page paper part passage past path pattern payment people period person phone place plain plan point
policy port present price problem process product profile project prompt proper question quick quiet range rate
reach reader reason record region release remote repair reply report request result return review right river
road room route rule sample scale schedule season second section select sender series server service shape share
short signal simple single size small sound source space speed stage standard start state station status step
still store stream street strong subject summer supply system table target task team term test text think third
thread ticket time title today token total tower track trade train travel tree trust turn under union unit
update upper usage user usual value vector version view visit voice volume wait water weather week weight window
winter without word worker world write year zone
"""
WORDS = _VOCABULARY.split()


def prose(key: Hashable, characters: int) -> str:
    """Exactly as many ASCII characters of words as asked for, drawn by the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=_DIGEST_BYTES).digest()
    rng = Random(digest)
    text = ""
    while len(text) < characters:
        text += " ".join(rng.choices(WORDS, k=(characters - len(text)) // 6 + 2)) + " "
    return text[: characters - 1] + "." if characters > 0 else ""
