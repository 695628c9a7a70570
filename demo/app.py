"""The Space: the same page, with a target that the Space has downloaded while it was built."""

from lilicorr_hf.demo.page import LOOK, build


demo = build(target="HuggingFaceTB/SmolLM2-135M-Instruct")

if __name__ == "__main__":
    demo.launch(**LOOK)
