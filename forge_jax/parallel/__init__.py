"""One model on several devices: the mesh, and the rules that divide the weights."""
