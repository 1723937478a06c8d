"""Plain words from which tasks are made: short, distinct, and one or two tokens for any tokenizer."""

_ADJECTIVES = """
    amber ancient bitter blue bold brave brief bright broad calm cheap clean clever cold cool crisp dark deep dry
    dull eager early faint fancy fast fine firm flat fresh gentle giant glad golden grand gray green happy hard heavy
    hidden hollow honest hot huge humble icy idle jolly keen kind large late lazy lean light little lively lonely long
    loud lucky mild misty modern narrow neat new noble odd old orange pale plain polite poor proud pure purple quick
    quiet rapid rare raw red rich ripe rough round royal rusty sad safe salty sharp shy silent silver simple slim slow
    small smart smooth soft solid sour spare steady steep stiff strange strict strong sturdy sweet swift tall tame
    thick thin tidy tiny tough vast vivid warm weak wide wild wise young
"""
_NOUNS = """
    ant apple apron arch arrow axe badger bag ball banana barn basket bat beach bean bear bee bell bench bird boat
    bone book boot bottle bowl box branch bread brick bridge broom brush bucket button cabin cake camel camera candle
    canoe cap car carpet carrot castle cat chain chair cherry chest clock cloud coat coin comb cork cow crab crane
    crow crown cup curtain deer desk dog doll door dove drum duck eagle egg elbow engine fan farm feather fence fern
    fish flag flute forest fork fox frog garden gate glove goat goose grape guitar hammer harbor hat hawk hen hill
    honey hook horse house island jacket jar kettle key kite kitten knife ladder lake lamp leaf lemon lion lizard lock
    map maple marble meadow melon mirror monkey moon mouse needle nest net nut oak ocean onion otter owl paddle panda
    paper parrot path pear pebble pen pencil piano pigeon pillow pine pipe plate plum pocket pond pony pumpkin
    rabbit raft rain ring river robin rocket roof root rope rose saddle sail salmon scarf school seal seed sheep shell
    ship shirt shoe shovel snail snake sock spider spoon squirrel stable star stone stove swan sword table teapot tent
    thumb tiger toad tower train tree trumpet tulip tunnel turtle umbrella valley vase violin wagon walnut wheel
    whistle willow window wolf zebra
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
assert len({*ADJECTIVES, *NOUNS}) == len(ADJECTIVES) + len(NOUNS)
