"""Small messages between ranks: texts, numbers and objects, and the header that shows that ranks
are in different calls. Begin with `collective_calls`. May import api.
"""
