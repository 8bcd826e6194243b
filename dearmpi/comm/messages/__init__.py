"""Small messages between ranks: texts, numbers and objects, and the header that shows that ranks
are in different calls. Begin with `exchange`. May import api.
"""
