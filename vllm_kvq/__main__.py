from vllm_kvq.cli import main

# guarded: multiprocessing imports the main module again in its children
if __name__ == "__main__":
    raise SystemExit(main())
