"""110 made-up messages in five sets, each with its right option."""

from __future__ import annotations

from typing import NamedTuple


class MessageSet(NamedTuple):
    question: str
    options: dict[str, str]  # name: what it means
    messages: dict[str, tuple[str, ...]]  # by right option


SETS = {
    "bicycle shop": MessageSet(
        "What is the message about?",
        {
            "billing": "invoices, prices, payments and refunds",
            "delivery": "parcels, couriers and dates",
            "defect": "something is broken or does not work",
            "account": "login, password and personal data",
        },
        {
            "billing": (
                "I was charged twice for the same helmet.",
                "Please send me the invoice of my last order.",
                "When will I get my money back for the returned wheels?",
                "The price on the receipt is higher than in the shop window.",
                "My card was declined, although there is money on it.",
                "Can I pay the frame in three instalments?",
            ),
            "delivery": (
                "The courier left the box at the wrong house.",
                "Where is my parcel? It was due on Monday.",
                "Can you send the saddle to my office instead of my home?",
                "Half of the order has arrived, the other box is missing.",
                "The tracking page has shown nothing for a week.",
            ),
            "defect": (
                "The chain broke on the second ride.",
                "My front light stays dark even with new batteries.",
                "The brakes squeak and hardly slow me down.",
                "There is a crack in the frame near the pedals.",
                "The gear lever is stuck in third gear.",
                "Air leaks from the new tyre within an hour.",
            ),
            "account": (
                "I cannot log in since I changed my phone.",
                "Please change the e-mail address of my profile.",
                "I forgot my password and get no reset link.",
                "Delete all data that you keep about me.",
                "My user name is spelled wrong, how can I edit it?",
            ),
        },
    ),
    "hotel": MessageSet(
        "Which team of the hotel should answer the guest?",
        {
            "housekeeping": "cleaning, towels and beds",
            "maintenance": "things in the room that do not work",
            "restaurant": "food, drinks and tables",
            "reception": "bookings, keys and check-out",
        },
        {
            "housekeeping": (
                "We need two more towels, please.",
                "The bed has not been made since yesterday.",
                "There is dust all over the shelf.",
                "Could somebody empty the bins in our bathroom?",
                "We would like fresh sheets today.",
            ),
            "maintenance": (
                "The heating makes a loud noise and stays cold.",
                "No water comes from the shower.",
                "The lamp beside the bed flickers.",
                "Our window does not close any more.",
                "The television shows no picture.",
                "The toilet is blocked.",
            ),
            "restaurant": (
                "Is there a vegan dish on tonight's menu?",
                "A table for four at eight, please.",
                "Until what time is breakfast served?",
                "My daughter is allergic to nuts: what can she eat?",
                "The soup that we were served was cold.",
                "Can we have a bottle of wine brought to our table?",
            ),
            "reception": (
                "We would like to stay one more night.",
                "I lost my room key at the lake.",
                "Can we check out at noon instead of ten?",
                "I have to cancel my reservation for next week.",
                "Please wake me with a call at six.",
            ),
        },
    ),
    "news": MessageSet(
        "Which section of a newspaper does the headline belong to?",
        {
            "sports": "matches, athletes and tournaments",
            "politics": "governments, elections and laws",
            "science": "research and discoveries",
            "business": "companies, markets and jobs",
        },
        {
            "sports": (
                "Goalkeeper saves two penalties in the final.",
                "Marathon record falls by nine seconds.",
                "Coach resigns after the fifth defeat in a row.",
                "Young swimmer wins three gold medals.",
                "Rain stops the tennis match in the fourth set.",
                "Champions begin the season with a draw.",
            ),
            "politics": (
                "Parliament votes for a new border law.",
                "President loses majority in the senate.",
                "Minister steps down over secret talks.",
                "Opposition calls for early elections.",
                "Mayor presents her plan to the city council.",
            ),
            "science": (
                "Telescope finds water on a distant planet.",
                "Researchers read the genes of an extinct horse.",
                "New particle puzzles physicists.",
                "Study explains why whales sing lower than before.",
                "Chemists turn old plastic into fuel in the laboratory.",
            ),
            "business": (
                "Carmaker closes its oldest factory.",
                "Shares of the bank fall by a fifth.",
                "Airline buys its smaller rival for two billion.",
                "Profits of the retailer rise for the third year.",
                "Start-up raises forty million from investors.",
                "Steel prices reach the highest level in a decade.",
            ),
        },
    ),
    "help desk": MessageSet(
        "What does the employee need help with?",
        {
            "printer": "printing, paper and toner",
            "network": "internet, wireless and connections",
            "software": "programs, updates and licences",
            "hardware": "laptop, screen, keyboard and mouse",
        },
        {
            "printer": (
                "My document comes out with grey stripes.",
                "It says that the toner is empty.",
                "Paper is jammed again on the second floor.",
                "I can only print in black, not in colour.",
                "The pages come out upside down and on one side only.",
            ),
            "network": (
                "The wireless signal drops every few minutes.",
                "No web page opens in the meeting room.",
                "I cannot reach the shared drive from home.",
                "The internet has been very slow since the morning.",
                "My cable connection shows no link.",
                "Video calls freeze because the connection is bad.",
            ),
            "software": (
                "The spreadsheet program crashes when I open a file.",
                "Please install the new version of the editor.",
                "My licence for the drawing program has expired.",
                "After the update the calendar has no reminders.",
                "How do I get a newer version of the browser?",
                "The accounting application shows an error at start.",
            ),
            "hardware": (
                "Some keys of my keyboard do not react.",
                "The screen of my laptop has a crack.",
                "My mouse moves by itself.",
                "The battery lasts only twenty minutes.",
                "The lid of my notebook does not close.",
            ),
        },
    ),
    "intent": MessageSet(
        "What does the writer want?",
        {
            "praise": "says that something was good",
            "complaint": "says that something was bad",
            "question": "asks for information",
            "order": "wants to buy something",
        },
        {
            "praise": (
                "What a lovely evening, thank you all so much!",
                "Your staff was kind and quick, I am delighted.",
                "The best coffee in town, as always.",
                "I am very happy with the new shoes.",
                "Great work, the garden looks wonderful.",
            ),
            "complaint": (
                "I waited an hour and no one came.",
                "The food was cold and the waiter was rude.",
                "This is the third time that my order is wrong.",
                "I am disappointed, the colour has washed out.",
                "Your phone line is always busy, this is annoying.",
                "The room was dirty and far too loud.",
            ),
            "question": (
                "At what time do you open on Sundays?",
                "Do you have parking behind the house?",
                "How long does the battery last?",
                "Which of the two models is lighter?",
                "Is the museum closed in winter?",
                "Where can I find the size chart?",
            ),
            "order": (
                "I would like two tickets for Friday, please.",
                "Send me ten boxes of the blue tiles.",
                "Please reserve the red jacket in size M, I will buy it.",
                "I want to subscribe to the magazine for a year.",
                "One large pizza with mushrooms to take away, please.",
            ),
        },
    ),
}
