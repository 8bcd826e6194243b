"""Pictures as data, and as SVG and PNG. Begin with `shape`. May import read and analyse."""
