// All tasks.

import { put } from "../dom.js";
import { plural } from "../format.js";
import { heading } from "../parts.js";
import { taskTable } from "../tasks.js";

export default function tasksPage(place) {
  place.title("tasks");
  const head = heading("Tasks");
  const tasks = taskTable();
  place.main.append(head.box, tasks.box);
  place.cluster((page) => {
    tasks.set(page.tasks);
    put(head.state, plural(page.tasks.size, "task"));
  });
}
