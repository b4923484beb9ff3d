/* Classifies one image with an exported network, through TensorFlow's C library alone.

   client SAVED_MODEL IMAGE INPUT CLASSES SCORES

   IMAGE is a JPEG or PNG file. INPUT, CLASSES and SCORES are the tensors, as operation:index, of
   the signature serving_bytes: `saved_model_cli show --dir SAVED_MODEL --all` prints them.
   Prints the most probable class and its score. Ends with 1, after one line, if anything fails. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensorflow/c/c_api.h"
#include "tensorflow/c/tf_tstring.h"

static void fail(const char* what, const char* why) {
  fprintf(stderr, "client: %s: %s\n", what, why);
  exit(1);
}

static void check(const char* what, const TF_Status* status) {
  if (TF_GetCode(status) != TF_OK) fail(what, TF_Message(status));
}

/* The content of a file; its caller frees it. */
static char* read_file(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) fail(path, "cannot be read");
  size_t room = 1 << 16;
  char* content = malloc(room);
  *size = 0;
  while (content != NULL) {
    const size_t got = fread(content + *size, 1, room - *size, file);
    if (got == 0) break;
    *size += got;
    if (*size == room) content = realloc(content, room *= 2);
  }
  if (content == NULL) fail(path, "is too large");
  if (ferror(file)) fail(path, "cannot be read");
  fclose(file);
  return content;
}

/* The tensor of the graph that `name`, operation:index, names. */
static TF_Output find(TF_Graph* graph, const char* name) {
  char operation[256];
  const char* colon = strrchr(name, ':');
  const size_t length = colon == NULL ? strlen(name) : (size_t)(colon - name);
  if (length >= sizeof operation) fail(name, "is too long a name");
  memcpy(operation, name, length);
  operation[length] = '\0';
  const TF_Output found = {TF_GraphOperationByName(graph, operation),
                           colon == NULL ? 0 : atoi(colon + 1)};
  if (found.oper == NULL) fail(name, "is not in the graph");
  return found;
}

/* A batch of one string. */
static TF_Tensor* batch_of_one(const char* content, size_t size) {
  const int64_t shape[] = {1};
  TF_Tensor* tensor = TF_AllocateTensor(TF_STRING, shape, 1, sizeof(TF_TString));
  TF_TString* string = TF_TensorData(tensor);
  TF_StringInit(string);
  TF_StringCopy(string, content, size);
  return tensor;
}

int main(int count, char** arguments) {
  if (count != 6) fail("five arguments are needed", "SAVED_MODEL IMAGE INPUT CLASSES SCORES");
  TF_Status* status = TF_NewStatus();
  TF_Graph* graph = TF_NewGraph();
  TF_SessionOptions* options = TF_NewSessionOptions();
  const char* tags[] = {"serve"};
  TF_Session* session = TF_LoadSessionFromSavedModel(options, NULL, arguments[1], tags, 1, graph,
                                                     NULL, status);
  check(arguments[1], status);

  size_t size;
  char* content = read_file(arguments[2], &size);
  const TF_Output inputs[] = {find(graph, arguments[3])};
  const TF_Output outputs[] = {find(graph, arguments[4]), find(graph, arguments[5])};
  TF_Tensor* fed[] = {batch_of_one(content, size)};
  TF_Tensor* answers[2] = {NULL, NULL};
  TF_SessionRun(session, NULL, inputs, fed, 1, outputs, answers, 2, NULL, 0, NULL, status);
  check(arguments[2], status);

  /* Both are [1, k], the most probable class first. */
  const TF_TString* best = TF_TensorData(answers[0]);
  const float* score = TF_TensorData(answers[1]);
  printf("%.*s %.6f\n", (int)TF_StringGetSize(best), TF_StringGetDataPointer(best), score[0]);

  TF_StringDealloc(TF_TensorData(fed[0]));
  TF_DeleteTensor(fed[0]);
  TF_DeleteTensor(answers[0]);
  TF_DeleteTensor(answers[1]);
  free(content);
  TF_CloseSession(session, status);
  TF_DeleteSession(session, status);
  TF_DeleteSessionOptions(options);
  TF_DeleteGraph(graph);
  TF_DeleteStatus(status);
  return 0;
}
