// Keeps one record in the browser's IndexedDB.

const STORE = "training";
const KEY = "digits";

/** Returns the record, or undefined. */
export function load() {
  return run("readonly", (store) => store.get(KEY));
}

export function save(record) {
  return run("readwrite", (store) => store.put(record, KEY));
}

export function clear() {
  return run("readwrite", (store) => store.delete(KEY));
}

async function run(mode, use) {
  const opening = indexedDB.open("gradfuse", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
  const database = await finished(opening);
  try {
    return await finished(use(database.transaction(STORE, mode).objectStore(STORE)));
  } finally {
    database.close();
  }
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
