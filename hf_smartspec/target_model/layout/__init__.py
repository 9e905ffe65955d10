"""Which tokens a packed forward computes, where their keys and values lie, and what each may attend to."""
