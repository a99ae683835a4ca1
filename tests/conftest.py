from secateur.models import mend_torchvision

mend_torchvision()  # before any test module imports transformers or timm
