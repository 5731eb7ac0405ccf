"""The checklist of a model family, run on its tiny model: `gracetune family check`, and the tests of the families.

Every check is a function of a `FamilyCase`. It returns what it saw, or raises `CheckFailedError`.
"""
