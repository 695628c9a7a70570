const line = element.querySelector(".notice");
const tell = () => {
  const { text = "", error = false } = props.value ?? {};
  line.textContent = text;
  line.classList.toggle("error", error);
  line.setAttribute("role", error ? "alert" : "status");
};
watch("value", tell);
tell();
