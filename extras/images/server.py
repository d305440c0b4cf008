"""A patch of SGLang's server: it reads clips as the trainer does."""

from inputs.hf_directory import sees


def install(settings) -> None:
    if sees(settings.model_path):
        from extras.images.reader import show_pairs

        show_pairs()  # threads of this process read images
