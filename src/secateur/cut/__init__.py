"""TAKE THEM OUT: costs and goals, surgery, the proof, repair and the checkpoint. Chooses no units."""
