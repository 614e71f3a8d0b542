from tensorline.cli import main

main()
