"""Pictures of the lattice and the walk."""
