// Signs in without leaving the page, so that a mistake does not lose the form. Without this script the form posts itself.

const form = document.getElementById("form");
const notice = document.getElementById("notice");
const field = document.getElementById("key");

async function signIn(event) {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  notice.textContent = "";
  try {
    const answer = await fetch("/dashboard/login", {
      method: "POST",
      headers: { accept: "application/json", "content-type": "application/x-www-form-urlencoded" },
      body: new URLSearchParams({ key: field.value }),
    });
    if (answer.ok) {
      field.value = "";
      location.replace("/dashboard" + location.hash);
      return;
    }
    const message = (await answer.json()).error.message;
    notice.textContent = message.charAt(0).toUpperCase() + message.slice(1) + ".";
  } catch {
    notice.textContent = "The platform did not answer. Please try again.";
  }
  button.disabled = false;
  field.select();
}

form.addEventListener("submit", signIn);
