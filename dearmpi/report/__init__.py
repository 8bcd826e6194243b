"""What a run did, as pictures and a page. Reads files; needs neither torch nor MPI."""
