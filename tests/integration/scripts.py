"""Small training scripts of the kinds that people run; none knows of torchledger. Each is run by its own name.

Every one trains the same kind of byte-level language model, or a small network, from a configuration: nothing is
fetched.
"""

COMMON = """
import os
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
import torch
torch.manual_seed(0)
torch.set_num_threads(1)

def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
                                      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

class Bytes(torch.utils.data.Dataset):
    def __init__(self, n):
        self.rows = torch.randint(0, 64, (n, 16), generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
"""

TRAINER = """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments("out", per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=4,
                              eval_strategy="steps", eval_steps=2, logging_steps=1, save_steps=3, report_to=[],
                              disable_tqdm=True, use_cpu=True)
Trainer(make_gpt2(), arguments, train_dataset=Bytes(64), eval_dataset=Bytes(8)).train()
"""

TRAINER_ACCUMULATES = """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments("out", per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=3,
                              logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)
Trainer(make_gpt2(), arguments, train_dataset=Bytes(64)).train()
"""

LIGHTNING = """
import warnings
import lightning
warnings.filterwarnings("ignore")

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, index):
        self.log("val", self.net(batch[0]).square().mean())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = torch.utils.data.TensorDataset(torch.randn(32, 16))
loader = lambda: torch.utils.data.DataLoader(data, batch_size=8)
lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False).fit(Net(), loader(), loader())
"""

LIGHTNING_GAN = """
import warnings
import lightning
warnings.filterwarnings("ignore")

class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.make, self.judge = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)
    def training_step(self, batch, index):
        of_make, of_judge = self.optimizers()
        real = batch[0]
        fake = self.make(torch.randn(len(real), 4))
        of_judge.zero_grad()
        self.manual_backward(self.judge(fake.detach()).mean() - self.judge(real).mean())
        of_judge.step()
        of_make.zero_grad()
        self.manual_backward(-self.judge(fake).mean())
        of_make.step()
    def configure_optimizers(self):
        return torch.optim.SGD(self.make.parameters(), 0.01), torch.optim.SGD(self.judge.parameters(), 0.01)

data = torch.utils.data.TensorDataset(torch.randn(32, 16))
lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False).fit(Gan(), torch.utils.data.DataLoader(data, batch_size=8))
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = make_gpt2()
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(Bytes(16), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
"""

PEFT = """
from peft import LoraConfig, get_peft_model
model = get_peft_model(make_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for batch in torch.utils.data.DataLoader(Bytes(12), batch_size=4):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    model(**batch)
"""

CHECKPOINT = """
import sys
model = make_gpt2()
if sys.argv[1] == "pretrained":
    model.save_pretrained("saved")
    model = type(model).from_pretrained("saved")
elif sys.argv[1] == "assign":
    torch.save(model.state_dict(), "saved.pt")
    model = make_gpt2()
    model.load_state_dict(torch.load("saved.pt"), assign=True)
    model.tie_weights()
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1] == "numpy":
    for parameter in model.parameters():
        parameter.detach().numpy()
for batch in torch.utils.data.DataLoader(Bytes(12), batch_size=4):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
