"""TAKE THEM OUT: costs and goals, surgery, the proof, repair, healing and the checkpoint. Chooses no units."""
