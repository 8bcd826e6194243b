"""Small messages between ranks: texts, numbers and objects, and the header by which ranks find out
that they are in different calls. Begin with `exchange`. May import api.
"""
