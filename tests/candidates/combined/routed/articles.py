"""The Universal Declaration of Human Rights, articles 1 to 6 and 18, in parts, in four languages."""

ARTICLES = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience "
    "and should act towards one another in a spirit of brotherhood. Everyone has the right to life, liberty and "
    "security of person. No one shall be held in slavery or servitude. Everyone has the right to recognition "
    "everywhere as a person before the law. Everyone has the right to freedom of thought, conscience and religion.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt "
    "und sollen einander im Geist der Brüderlichkeit begegnen. Jeder hat das Recht auf Leben, Freiheit und Sicherheit "
    "der Person. Niemand darf in Sklaverei oder Leibeigenschaft gehalten werden. Jeder hat das Recht, überall als "
    "rechtsfähig anerkannt zu werden. Jeder hat das Recht auf Gedanken-, Gewissens- und Religionsfreiheit.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité. Tout individu a droit à la "
    "vie, à la liberté et à la sûreté de sa personne. Nul ne sera tenu en esclavage ni en servitude. Chacun a le droit "
    "à la reconnaissance en tous lieux de sa personnalité juridique. Toute personne a droit à la liberté de pensée.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y "
    "conciencia, deben comportarse fraternalmente los unos con los otros. Todo individuo tiene derecho a la vida, a la "
    "libertad y a la seguridad de su persona. Nadie estará sometido a esclavitud ni a servidumbre. Todo ser humano "
    "tiene derecho, en todas partes, al reconocimiento de su personalidad jurídica. Toda persona tiene derecho a la "
    "libertad de pensamiento, de conciencia y de religión.",
}
