"""Single facts: some questions a block, then the answer after "= ". Answers may hold [choices|of words]."""

GENERAL = """
How many continents are there?
What is the number of continents?
= There are seven continents.

Name the continents.
What are the seven continents?
Which continents are there?
= The seven continents are Africa, Antarctica, Asia, Europe, North America, Oceania and South America.

What is the largest ocean?
Which ocean is the biggest?
What is the biggest ocean on Earth?
= The Pacific Ocean is the largest ocean.

What is the longest river in the world?
Which river is the longest?
= The Nile is often called the longest river in the world.

What is the highest mountain in the world?
What is the tallest mountain?
Which mountain is the highest on Earth?
= Mount Everest is the highest mountain in the world.

What is the largest country in the world?
Which country is the biggest?
= Russia is the largest country in the world.

What is the smallest country in the world?
Which country is the smallest?
= Vatican City is the smallest country in the world.

What is the largest planet?
Which planet is the biggest?
What is the biggest planet in the solar system?
= Jupiter is the largest planet in the solar system.

What is the smallest planet?
Which planet is the smallest?
= Mercury is the smallest planet in the solar system.

Which planet is called the red planet?
What is the red planet?
= Mars is called the red planet.

Which planet has big rings?
What planet is known for its rings?
= Saturn is known for its big rings.

Which planet do we live on?
What planet are we on?
What is our planet called?
= We live on Earth.

What is the sun?
What kind of thing is the sun?
Is the sun a star?
= The sun is a star. It gives us light and warmth.

What is the moon?
Tell me about the moon.
= The moon is a ball of rock that goes around the Earth.

How long does the Earth take to go around the sun?
How long does it take the Earth to circle the sun?
= The Earth goes around the sun in about 365 days, which is one year.

What is a star?
What are stars?
Tell me about stars.
= A star is a huge ball of hot gas that gives off light.

Why is the sky blue?
What makes the sky blue?
Can you explain why the sky is blue?
= The sky is blue because air scatters blue light from the sun more than red light.

Why does it rain?
Where does rain come from?
What makes it rain?
= Water rises into the air from the sea, forms clouds, and falls down again as rain.

What is rain?
= Rain is water that falls from clouds.

What is snow?
What is snow made of?
= Snow is frozen water that falls from clouds as small white flakes.

What is a rainbow?
How does a rainbow form?
Why do we see rainbows?
= A rainbow forms when sunlight passes through drops of water and splits into colours.

What are the colours of the rainbow?
Name the colors of the rainbow.
Which colours are in a rainbow?
= The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.

What are the primary colours?
Name the primary colors.
= The primary colours in painting are red, yellow and blue.

At what temperature does water boil?
When does water boil?
What is the boiling point of water?
How hot is boiling water?
= Water boils at 100 degrees Celsius.

At what temperature does water freeze?
When does water freeze?
What is the freezing point of water?
= Water freezes at 0 degrees Celsius.

What is ice?
What is ice made of?
= Ice is frozen water.

What is water made of?
What is the chemical formula of water?
What is H2O?
= Water is H2O. It is made of hydrogen and oxygen.

What is steam?
= Steam is water that has become a hot gas.

What do plants need to grow?
What do plants need?
What does a plant need to live?
= Plants need light, water, air and soil to grow.

What is photosynthesis?
Explain photosynthesis.
How do plants make food?
= Photosynthesis is how plants use sunlight to make food from water and air.

What gas do we breathe?
What gas do people need to breathe?
Which gas do we need to live?
= We need oxygen to breathe.

What is air made of?
Which gases are in the air?
= Air is mostly nitrogen and oxygen.

What is gravity?
Explain gravity.
Why do things fall down?
= Gravity is the force that pulls things towards the Earth.

What is electricity?
= Electricity is the flow of tiny charged particles. It powers lamps and computers.

What is an atom?
What are atoms?
= An atom is a very small piece of matter. Everything is made of atoms.

What is a magnet?
= A magnet is an object that attracts iron.

What is the speed of light?
How fast is light?
= Light travels about 300,000 kilometres in one second.

What is faster, light or sound?
Is light faster than sound?
= Light is much faster than sound.

What is lightning?
= Lightning is a flash of electricity in a storm.

What is thunder?
= Thunder is the sound that lightning makes.

What is a volcano?
Tell me about volcanoes.
= A volcano is a mountain that can throw out hot rock, ash and gas.

What is an earthquake?
= An earthquake is a shaking of the ground.

What is a desert?
= A desert is a dry place where very little rain falls.

What is an island?
= An island is land with water all around it.

What is a river?
= A river is water that flows through the land to a lake or to the sea.

What is the largest desert?
What is the largest hot desert?
= The Sahara in Africa is the largest hot desert.

What is the largest animal?
What is the biggest animal in the world?
Which animal is the largest?
= The blue whale is the largest animal in the world.

What is the tallest animal?
Which animal is the tallest?
= The giraffe is the tallest animal.

What is the fastest land animal?
Which animal runs the fastest?
What is the fastest animal on land?
= The cheetah is the fastest land animal.

What is the largest bird?
Which bird is the biggest?
= The ostrich is the largest bird.

What is a mammal?
= A mammal is an animal that feeds its young with milk.

What is an insect?
= An insect is a small animal with six legs.

What do bees make?
What do bees produce?
Who makes honey?
= Bees make honey.

What do cows give us?
What do we get from cows?
Where does milk come from?
= Cows give us milk.

What do sheep give us?
Where does wool come from?
= Wool comes from sheep.

What do chickens lay?
Where do eggs come from?
= Chickens lay eggs.

What does a caterpillar become?
What does a caterpillar turn into?
= A caterpillar becomes a butterfly.

What does a tadpole become?
What does a tadpole turn into?
= A tadpole becomes a frog.

Can penguins fly?
Do penguins fly?
= No, penguins cannot fly, but they swim very well.

Can fish fly?
= Most fish cannot fly. They swim.

Can dogs swim?
= Yes, most dogs can swim.

Are whales fish?
Is a whale a fish?
= No, a whale is a mammal.

Is a spider an insect?
= No, a spider has eight legs and is an arachnid.

Which animal is called the king of the jungle?
Who is the king of the animals?
= The lion is called the king of the jungle.

What do rabbits like to eat?
What do rabbits eat?
= Rabbits eat grass, leaves and carrots.

What do cats eat?
What do cats like to eat?
= Cats eat meat and fish.

What do dogs eat?
What do dogs like to eat?
= Dogs eat meat and dog food, and they love bones.

What do pandas eat?
= Pandas eat bamboo.

What do monkeys like to eat?
= Monkeys like fruit, above all bananas.

What is a dog?
Tell me about dogs.
Describe a dog.
= A dog is a friendly animal with four legs. Dogs are loyal and like to play.

What is a cat?
Tell me about cats.
Describe a cat.
= A cat is a small animal with soft fur. Cats like to sleep and to hunt mice.

What is an elephant?
Tell me about elephants.
= An elephant is a very big grey animal with a long trunk.

What are the four seasons?
Name the four seasons.
Which seasons are there?
Name the seasons of the year.
= The four seasons are spring, summer, autumn and winter.

What season comes after winter?
Which season follows winter?
= Spring comes after winter.

What season comes after spring?
Which season follows spring?
= Summer comes after spring.

What season comes after summer?
Which season follows summer?
= Autumn comes after summer.

What season comes after autumn?
Which season follows autumn?
= Winter comes after autumn.

Which season is the coldest?
What is the coldest season?
= Winter is the coldest season.

Which season is the warmest?
What is the hottest season?
= Summer is the warmest season.

What are the days of the week?
Name the days of the week.
List the days of the week.
= The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.

What are the months of the year?
Name all the months.
List the months of the year.
= The months are January, February, March, April, May, June, July, August, September, October, November and December.

What are the planets?
Name the planets of the solar system.
List the planets.
= The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.

Which month is the shortest?
What is the shortest month?
= February is the shortest month.

What day comes after the weekend?
= Monday comes after the weekend.

Which days are the weekend?
What is the weekend?
= The weekend is Saturday and Sunday.

How many fingers do people have?
How many fingers do you have on two hands?
= People have ten fingers.

How many eyes do people have?
How many eyes does a person have?
= People have two eyes.

How many legs does a person have?
= A person has two legs.

How many wheels does a car have?
= A car has four wheels.

How many wheels does a bicycle have?
How many wheels does a bike have?
= A bicycle has two wheels.

How many arms does an octopus have?
= An octopus has eight arms.

How many lives does a cat have?
= A cat has only one life, but people like to say that it has nine.

What do we use to see?
Which part of the body do we see with?
= We see with our eyes.

What do we hear with?
Which part of the body do we hear with?
= We hear with our ears.

What are the five senses?
Name the five senses.
= The five senses are sight, hearing, smell, taste and touch.

What does the heart do?
What is the heart for?
= The heart pumps blood through the body.

What does the brain do?
What is the brain for?
= The brain lets us think, feel and move.

How many bones does a person have?
= An adult person has 206 bones.

What is a doctor?
What does a doctor do?
= A doctor helps people who are ill.

What does a teacher do?
What is a teacher?
= A teacher helps people to learn.

What does a baker do?
What does a baker make?
= A baker makes bread and cakes.

What does a farmer do?
= A farmer grows plants and keeps animals.

What does a pilot do?
Who flies a plane?
= A pilot flies planes.

What does a painter do?
= A painter paints pictures or walls.

What is bread made of?
How do you make bread?
= Bread is made of flour, water, salt and yeast.

What is cheese made of?
What is cheese made from?
= Cheese is made from milk.

What is paper made of?
What is paper made from?
= Paper is made from wood.

What is glass made of?
What is glass made from?
= Glass is made from sand.

What is chocolate made of?
What is chocolate made from?
= Chocolate is made from cocoa beans, sugar and milk.

What is wine made from?
= Wine is made from grapes.

What are clouds made of?
What is a cloud?
What is a cloud made of?
= A cloud is made of very small drops of water.

What do you use an umbrella for?
What is an umbrella for?
= An umbrella keeps you dry in the rain.

What do you do with a key?
What is a key for?
= A key opens a lock.

What is a clock for?
What does a clock do?
= A clock shows the time.

What is a book?
= A book is made of pages with words or pictures to read.

What is a library?
= A library is a place with many books to read and borrow.

What is music?
= Music is sound put together in a way that people enjoy.

What is a computer?
What does a computer do?
Explain what a computer is.
= A computer is a machine that works with data by following a program.

What is a program?
What is software?
= A program is a list of instructions for a computer.

What is the internet?
= The internet connects computers all over the world.

What is a robot?
= A robot is a machine that can do work by itself.

What is Python?
What is the Python language?
= Python is a programming language. It is easy to read and very popular.

What is a GPU?
What is a graphics card?
= A GPU is a processor that does many calculations at the same time.

What is a CPU?
What does a CPU do?
= A CPU is the main processor of a computer.

What is artificial intelligence?
What is AI?
Explain AI.
= Artificial intelligence is software that does things that seem to need thinking, like understanding language.

What is machine learning?
Explain machine learning.
= Machine learning is a way to let computers learn from examples.

What is a language model?
What is an LLM?
What is a large language model?
How does a language model work?
= A language model is a program that predicts the next word of a text, again and again.

What is a neural network?
= A neural network is a program with many numbers that are learned from examples.

What is a token?
What is a token in a language model?
= A token is a small piece of text, like a word or a part of a word.

What is a transformer?
What is a transformer model?
= A transformer is a neural network that uses attention to read text.

What is attention in a model?
What is attention?
= Attention lets a model look back at the parts of a text that matter.

What is temperature in sampling?
What does temperature do?
= A low temperature makes answers predictable. A high temperature makes them varied.

What is JSON?
What does JSON stand for?
Explain JSON.
= JSON is a simple text format for data. It is made of names and values.

What is an API?
= An API is the way in which one program talks to another.

What is an algorithm?
= An algorithm is a list of steps that solves a problem.

What is a prime number?
= A prime number is a number above 1 that can be divided only by 1 and itself.

What is the smallest prime number?
= The smallest prime number is 2.

What is a triangle?
= A triangle is a shape with three sides.

What is a circle?
= A circle is a round shape.

What is half of 10?
= Half of 10 is 5.

What is half of 100?
= Half of 100 is 50.

What is pi?
What is the value of pi?
= Pi is about 3.14159.

What is zero?
= Zero is the number before one. It means nothing.

Who wrote Romeo and Juliet?
Who is the author of Hamlet?
Who wrote Hamlet?
= William Shakespeare wrote it.

Who painted the Mona Lisa?
Who made the Mona Lisa?
= Leonardo da Vinci painted the Mona Lisa.

Who was Albert Einstein?
Who is Einstein?
= Albert Einstein was a physicist who is famous for the theory of relativity.

Who was Isaac Newton?
Who is Newton?
= Isaac Newton was a scientist who described gravity.

Who was Marie Curie?
= Marie Curie was a scientist who studied radioactivity.

Who was the first person on the moon?
Who was the first man on the moon?
Who first walked on the moon?
= Neil Armstrong was the first person on the moon, in 1969.

Where is the Eiffel Tower?
In which city is the Eiffel Tower?
= The Eiffel Tower is in Paris, France.

Where are the pyramids?
Where are the great pyramids?
= The great pyramids are in Egypt.

Where is the Great Wall?
= The Great Wall is in China.

Where is the Colosseum?
= The Colosseum is in Rome, Italy.

Where is Big Ben?
= Big Ben is in London, England.

What is Paris?
Tell me about Paris.
= Paris is the capital of France. It is famous for the Eiffel Tower.

What is London?
Tell me about London.
= London is the capital of the United Kingdom. It lies on the river Thames.

What is Europe?
= Europe is a continent with many countries.

What is Africa?
= Africa is a continent. It is the home of lions and elephants.

Tell me about France.
What is France?
= France is a country in Europe. Its capital is Paris, and people there speak French.

Tell me about Japan.
What is Japan?
= Japan is a country of islands in Asia. Its capital is Tokyo.

What is friendship?
What is a friend?
= A friend is someone who likes you and helps you.

What is love?
= Love is a strong and warm feeling for someone.

What is happiness?
= Happiness is the feeling of being glad and content.

What is the meaning of life?
= People have many answers. A good one is to be kind and to learn.

What is a poem?
= A poem is a short text with rhythm, and often with rhymes.

What is a story?
= A story tells what happened to someone, real or made up.

What should I do if I am tired?
I am tired.
I'm so tired today.
What helps when I am tired?
= [You should rest|Take a break|Have some rest]. A little sleep often helps.

What should I do if I am hungry?
I am hungry.
I'm hungry.
= [You could eat an apple or make a sandwich|How about a sandwich or some soup]?

I am thirsty.
What should I drink?
= [Drink a glass of water|A glass of water is a good idea].

What should I eat for breakfast?
What is a good breakfast?
= [Bread with fruit is|Porridge with fruit is|Eggs and toast are] a good breakfast.

What should I cook tonight?
What can I cook for dinner?
= [Soup|Pasta with tomatoes|Rice with vegetables] is easy to make and tastes good.

What can I do when it rains?
What should I do on a rainy day?
= You can [read a book|play a game|bake a cake] or [watch a film|paint a picture|write a letter].

How do I make tea?
How do you make tea?
How can I make a cup of tea?
= Boil some water, pour it over the tea, and wait three minutes.

How do I boil an egg?
How do you boil an egg?
= Put the egg in boiling water for about eight minutes.

How can I sleep better?
I cannot sleep.
= Go to bed at the same time each day, and keep your room dark and quiet.

How can I stay healthy?
How do I stay healthy?
= Eat well, move every day, and sleep enough.

How can I learn faster?
How do I learn something new?
= Practise a little every day, and do not give up.

How do I make friends?
How can I find friends?
= Be kind, listen to others, and be yourself.
"""
