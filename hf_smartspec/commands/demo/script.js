// Replays races: every token was sent with the second at which it came.
(() => {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

  function play(race) {
    const run = (race.run = (race.run || 0) + 1); // an earlier replay ends
    const longest = Number(race.dataset.longest);
    const speed = Number(race.querySelector(".ss-speed").value);
    const lanes = [...race.querySelectorAll(".ss-lane")].map((lane) => ({
      lane,
      seconds: Number(lane.dataset.seconds),
      tokens: [...lane.querySelectorAll(".t")],
      times: [...lane.querySelectorAll(".t")].map((token) => Number(token.dataset.t)),
      next: 0,
    }));
    race.querySelectorAll(".t").forEach((token) => token.classList.remove("on"));
    const start = performance.now();

    function frame(now) {
      if (race.run !== run || !race.isConnected) return;
      const clock = Math.min(still ? longest : ((now - start) / 1000) * speed, longest);
      lanes.forEach((item) => show(item, clock));
      const rates = lanes.map((item) => item.next / Math.max(Math.min(clock, item.seconds), 1e-3));
      const isOver = clock >= longest;
      const ratio = isOver ? Number(race.dataset.ratio) : rates[0] > 0 ? rates[1] / rates[0] : 0;
      race.querySelector(".ss-ratio-value").textContent = ratio ? ratio.toFixed(2) : "–";
      race.querySelector(".ss-time").textContent = `${clock.toFixed(1)} s`;
      race.classList.toggle("over", isOver);
      if (!isOver) requestAnimationFrame(frame);
    }
    requestAnimationFrame(frame);
  }

  function show(item, clock) {
    const text = item.lane.querySelector(".ss-text");
    const before = item.next;
    while (item.next < item.tokens.length && item.times[item.next] <= clock) {
      item.tokens[item.next].classList.add("on");
      item.next += 1;
    }
    if (item.next > before) text.scrollTop = text.scrollHeight;
    const isDone = clock >= item.seconds;
    const spent = Math.min(clock, item.seconds);
    const rate = item.next / Math.max(spent, 1e-3);
    item.lane.querySelector(".ss-rate").textContent = rate.toFixed(1);
    item.lane.querySelector(".ss-count").textContent = item.next;
    item.lane.querySelector(".ss-elapsed").textContent = spent.toFixed(2);
    item.lane.querySelector(".ss-track i").style.width = `${(100 * item.next) / Math.max(item.tokens.length, 1)}%`;
    item.lane.classList.toggle("done", isDone);
  }

  function find() {
    document.querySelectorAll(".ss-race:not([data-on])").forEach((race) => {
      race.dataset.on = "1";
      play(race);
    });
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest(".ss-replay");
    if (event.target.closest && event.target.closest(".ss-theme")) document.body.classList.toggle("dark");
    if (button) play(button.closest(".ss-race"));
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches && event.target.matches(".ss-speed")) play(event.target.closest(".ss-race"));
  });
  new MutationObserver(find).observe(document.documentElement, { childList: true, subtree: true });
  find();
})();
