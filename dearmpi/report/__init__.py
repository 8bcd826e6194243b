"""What a run did, as pictures and a page. Reads files; needs neither torch nor MPI. Begin with
`page/report`. The rooms from the bottom up: read, analyse, draw, page.
"""
